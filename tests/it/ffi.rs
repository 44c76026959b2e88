//! The C face from outside: C and C++ programs (`tests/c`) compiled against `terrace.h`, linked to the shared library, and
//! run; and that header and library say the same.
//!
//! The library is the one that Cargo puts beside this test binary when it builds what the tests depend on. Without a C or C++
//! compiler, `nm` or valgrind a test says so in a line and skips what needs them.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::mem::{offset_of, size_of};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use terrace_allocator::ffi::{BACKING_CUDA, BACKING_HOST, Options, Pool, Status, VERSION};
use terrace_tests::corpus::root;

pub(crate) const STRICT: [&str; 5] = ["-Wall", "-Wextra", "-Werror", "-pedantic", "-g"];

#[test]
fn the_header_is_clean_c99_and_cpp17() {
    for (compiler, language, standard) in [("cc", "c", "-std=c99"), ("g++", "c++", "-std=c++17")] {
        let Some(compiler) = tool(compiler) else { continue };
        let header = root().join("allocator/include/terrace.h");
        succeeds(Command::new(compiler).args(STRICT).args([standard, "-fsyntax-only", "-x", language]).arg(header));
    }
}

#[test]
fn a_c_program_makes_every_call() {
    let Some(program) = c("device") else { return };
    check(&mut Command::new(program), EVERY_CALL);
}

#[test]
fn a_c_program_leaks_nothing_and_reads_nothing_wrong() {
    let Some(program) = c("device") else { return };
    check_memory(&program, &[], EVERY_CALL);
}

const EVERY_CALL: &[&str] = &[
    "versions and names",
    "options",
    "arguments",
    "record and replay",
    "divergence",
    "out of memory",
    "pools",
    "several streams",
    "wrong frees",
    "threads",
    "forks",
];

#[test]
fn a_c_program_uses_a_cuda_device() {
    let Some(program) = c("cuda") else { return };
    let text = succeeds(&mut Command::new(program));
    let required = std::env::var("REQUIRE_GPU").is_ok_and(|value| value == "1");
    match text.trim_end() {
        "cuda" => {}
        text if required => panic!("REQUIRE_GPU=1, but {text}"),
        text => {
            assert!(text.starts_with("TERRACE_NO_DEVICE: "), "{text}");
            skip(&format!("CUDA from C: {text}"));
        }
    }
}

#[test]
fn pytorchs_calls_throw_what_cpp_catches() {
    let Some(program) = cpp("torch", &[], "torch") else { return };
    check(&mut on_host(&program), PYTORCHS_CALLS);
}

#[test]
fn pytorchs_calls_leak_nothing_and_read_nothing_wrong() {
    let Some(program) = cpp("torch", &[], "torch") else { return };
    check_memory(&program, &HOST, PYTORCHS_CALLS);
}

#[test]
fn a_library_that_python_loads_catches_them_too() {
    let Some(library) = cpp("torch", &["-DLIBRARY", "-fPIC", "-shared"], "libtorch_main.so") else { return };
    let Some(compiler) = tool("cc") else { return };
    // This one is not linked to the library: it comes with what is loaded.
    let loader = built("load");
    let source = source("load.c");
    succeeds(Command::new(compiler).args(STRICT).args(["-std=gnu99", "-o"]).arg(&loader).arg(source).arg("-ldl"));
    check(on_host(&loader).arg(library), PYTORCHS_CALLS);
}

const PYTORCHS_CALLS: &[&str] =
    &["requests", "spent", "frees", "steps", "pools", "registered", "fractions", "environment"];

#[test]
#[cfg(unix)]
fn without_cpp_a_failed_request_says_why_and_aborts() {
    use std::os::unix::process::ExitStatusExt;

    let Some(program) = c("no_cxx") else { return };
    let out = on_host(&program).output().unwrap();
    let (said, complained) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    // SIGABRT.
    assert_eq!(out.status.signal(), Some(6), "{said}{complained}");
    assert_eq!(said, "served\n");
    assert!(complained.starts_with("CUDA out of memory: torch asked for 1073741824 bytes"), "{complained}");
    assert!(complained.ends_with("there is nobody to throw this to: aborting\n"), "{complained}");
}

#[test]
fn the_headers_numbers_and_layouts_are_the_librarys() {
    let Some(program) = c("layout") else { return };
    let mut expect = String::new();
    let mut number = |name: &str, value: u64| writeln!(expect, "{name} {value}").unwrap();
    number("TERRACE_VERSION", u64::from(VERSION));
    number("TERRACE_HOST", u64::from(BACKING_HOST));
    number("TERRACE_CUDA", u64::from(BACKING_CUDA));
    number("sizeof(terrace_options)", size_of::<Options>() as u64);
    let known = Options::default();
    let mut field = |name: &str, offset: usize, size: usize| writeln!(expect, "{name} {offset} {size}").unwrap();
    field("terrace_options.size", offset_of!(Options, size), size_of_val(&known.size));
    field("terrace_options.budget", offset_of!(Options, budget), size_of_val(&known.budget));
    field("terrace_options.align", offset_of!(Options, align), size_of_val(&known.align));
    field("terrace_options.backing", offset_of!(Options, backing), size_of_val(&known.backing));
    field("terrace_options.ordinal", offset_of!(Options, ordinal), size_of_val(&known.ordinal));
    field("terrace_options.debug", offset_of!(Options, debug), size_of_val(&known.debug));
    field("terrace_options.patience", offset_of!(Options, patience), size_of_val(&known.patience));
    field("terrace_options.most_keys", offset_of!(Options, most_keys), size_of_val(&known.most_keys));
    field("terrace_options.reserved", offset_of!(Options, reserved), size_of_val(&known.reserved));
    writeln!(expect, "sizeof(terrace_pool) {}", size_of::<Pool>()).unwrap();
    let mut field = |name: &str, offset: usize| writeln!(expect, "{name} {offset} 8").unwrap();
    field("terrace_pool.first", offset_of!(Pool, first));
    field("terrace_pool.second", offset_of!(Pool, second));
    writeln!(expect, "sizeof(terrace_status) {}", size_of::<Status>()).unwrap();
    for status in Status::ALL {
        writeln!(expect, "{} {}", status.name().to_str().unwrap(), status as u64).unwrap();
    }
    assert_eq!(succeeds(&mut Command::new(program)), expect);
}

#[test]
fn the_header_declares_what_the_library_exports_and_no_more() {
    let declared = declared(&fs::read_to_string(root().join("allocator/include/terrace.h")).unwrap());
    assert!(declared.contains("terrace_create") && declared.contains("terrace_torch_malloc"), "{declared:?}");
    let Some(nm) = tool("nm") else { return };
    let text = succeeds(Command::new(nm).args(["-D", "--defined-only"]).arg(library()));
    let names = text.lines().filter_map(|line| line.split_whitespace().next_back());
    let exported: BTreeSet<String> = names.filter(|name| name.starts_with("terrace_")).map(str::to_owned).collect();
    assert_eq!(declared, exported);
}

/// The functions that a header declares: names that a parenthesis follows, outside comments and macros.
pub(crate) fn declared(header: &str) -> BTreeSet<String> {
    let mut code = String::new();
    let mut rest = header;
    while let Some((before, after)) = rest.split_once("/*") {
        code += before;
        rest = after.split_once("*/").expect("a comment ends").1;
    }
    code += rest;
    let code: String = code.lines().filter(|line| !line.starts_with('#')).collect::<Vec<_>>().join("\n");
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let calls = code.match_indices('(').filter_map(|(at, _)| code[..at].rsplit(|c| !is_name(c)).next());
    calls.filter(|name| name.starts_with("terrace_")).map(str::to_owned).collect()
}

/// The environment in which PyTorch's functions open host memory.
const HOST: [(&str, &str); 2] = [("TERRACE_BACKING", "host"), ("TERRACE_BUDGET", "1MiB")];

fn on_host(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.envs(HOST);
    command
}

/// That a program ends well and prints these lines.
fn check(command: &mut Command, expect: &[&str]) {
    let text = succeeds(command);
    assert_eq!(text.lines().collect::<Vec<_>>(), expect);
}

/// The same under valgrind, which must find no wrong access and nothing lost for good.
fn check_memory(program: &Path, environment: &[(&str, &str)], expect: &[&str]) {
    let Some(valgrind) = tool("valgrind") else { return };
    let options = ["-q", "--error-exitcode=9", "--leak-check=full", "--errors-for-leak-kinds=definite"];
    let mut command = Command::new(valgrind);
    command.args(options).arg("--show-leak-kinds=definite").envs(environment.iter().copied()).arg(program);
    check(&mut command, expect);
}

/// Compiles a C program of `tests/c` and links it to the library; `None` is a skip.
fn c(name: &str) -> Option<PathBuf> {
    let program = built(name);
    let mut command = Command::new(tool("cc")?);
    command.args(STRICT).arg("-std=c99").arg(source(&format!("{name}.c")));
    link(&mut command, &program);
    Some(program)
}

/// The same for C++.
fn cpp(name: &str, options: &[&str], output: &str) -> Option<PathBuf> {
    let output = built(output);
    let mut command = Command::new(tool("g++")?);
    command.args(STRICT).arg("-std=c++17").args(options).arg(source(&format!("{name}.cc")));
    link(&mut command, &output);
    Some(output)
}

fn link(command: &mut Command, output: &Path) {
    command.arg("-I").arg(root().join("allocator/include"));
    // By its path: a library without a soname is then loaded from there alone. By its name, the first one in Cargo's
    // LD_LIBRARY_PATH would do, which may be what an earlier `cargo build` left.
    succeeds(command.arg(library()).args(["-pthread", "-o"]).arg(output));
}

fn source(name: &str) -> PathBuf {
    root().join("tests/c").join(name)
}

/// A path of its own for each caller: tests run at once, and one must not run what another is writing.
fn built(name: &str) -> PathBuf {
    let test = std::thread::current().name().unwrap_or("main").replace("::", "-");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("ffi").join(test);
    fs::create_dir_all(&folder).unwrap();
    folder.join(name)
}

/// The shared library: beside this test binary, or else built by the Cargo that builds this.
fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let name = format!("{}terrace_allocator{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
        let beside = std::env::current_exe().unwrap().parent().unwrap().join(&name);
        if beside.exists() {
            return beside;
        }
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("ffi-build");
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--offline", "-p", "terrace-allocator", "--target-dir"]).arg(&target);
        succeeds(cargo.current_dir(root()));
        target.join("debug").join(name)
    })
}

/// A tool of this machine; without it, `None` after a line that says so.
pub(crate) fn tool(name: &str) -> Option<&str> {
    let works = Command::new(name).arg("--version").output().is_ok_and(|out| out.status.success());
    if !works {
        skip(&format!("no {name} on this machine"));
    }
    works.then_some(name)
}

/// Around the capture of the test harness: a skip that nobody reads is a silent one.
fn skip(why: &str) {
    let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("SKIP {why}\n").as_bytes());
}

/// What a command prints, if it ends well.
pub(crate) fn succeeds(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (said, complained) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{command:?}: {status}\n{said}{complained}");
    said.into_owned()
}
