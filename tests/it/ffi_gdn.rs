//! The C face of the kernels from outside: `tests/c/gdn.c`, compiled as C99 and as C++17 against `terrace_gdn.h`, linked to the
//! shared library, and run on the CPU; and that header and library say the same.
//!
//! Without a C or C++ compiler, `nm` or valgrind a test says so in a line and skips what needs them.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::mem::{offset_of, size_of};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::{env, fs};

use terrace_kernels::ffi::{self, CDevice, CPath, CPool, CTensor, DecodeArgs, PrefillArgs, Status, VERSION};
use terrace_tests::corpus::root;

use super::ffi::{STRICT, declared, succeeds, tool};

const EVERY_CALL: &[&str] =
    &["versions and sizes", "a prefill", "the same bits in two calls", "a decode step", "wrong arguments", "cuda"];

#[test]
fn a_c_and_a_cpp_program_make_every_call() {
    for language in [C, CPP] {
        let Some(program) = program("gdn", language) else { continue };
        let text = succeeds(&mut Command::new(program));
        assert_eq!(text.lines().collect::<Vec<_>>(), EVERY_CALL);
    }
}

#[test]
fn a_c_program_leaks_nothing_and_reads_nothing_wrong() {
    let Some(program) = program("gdn", C) else { return };
    let Some(valgrind) = tool("valgrind") else { return };
    let mut command = Command::new(valgrind);
    command.args(["-q", "--error-exitcode=9", "--leak-check=full", "--errors-for-leak-kinds=definite"]);
    let text = succeeds(command.arg("--show-leak-kinds=definite").arg(program));
    assert_eq!(text.lines().collect::<Vec<_>>(), EVERY_CALL);
}

#[test]
fn the_headers_numbers_and_layouts_are_the_librarys() {
    let Some(program) = program("gdn_layout", C) else { return };
    let mut expect = String::new();
    let mut number = |name: &str, value: u64| writeln!(expect, "{name} {value}").unwrap();
    number("TERRACE_GDN_VERSION", VERSION.into());
    for (name, value) in [
        ("CPU", ffi::CPU),
        ("CUDA", ffi::CUDA),
        ("BF16", ffi::BF16),
        ("FP16", ffi::FP16),
        ("FP32", ffi::FP32),
        ("FUSED", ffi::FUSED),
        ("STAGED", ffi::STAGED),
    ] {
        number(&format!("TERRACE_GDN_{name}"), value.into());
    }
    macro_rules! layout {
        ($c:literal, $rust:ty, $($field:ident)*) => {
            writeln!(expect, "sizeof({}) {}", $c, size_of::<$rust>()).unwrap();
            $(
                let size = size_of_field(|it: &$rust| size_of_val(&it.$field));
                writeln!(expect, "{}.{} {} {size}", $c, stringify!($field), offset_of!($rust, $field)).unwrap();
            )*
        };
    }
    layout!("terrace_gdn_device", CDevice, kind ordinal stream threads);
    layout!("terrace_gdn_tensor", CTensor, data token_stride head_stride dtype);
    layout!("terrace_gdn_pool", CPool, data slots slot_stride dtype);
    layout!("terrace_gdn_prefill_args", PrefillArgs, device tokens key_heads value_heads q k v g beta o host_cu_seqlens
        sequences host_chunk_indices chunks host_chunk_offsets initial host_initial_slots host_has_initial last host_last_slots
        in_place checkpoint_every checkpoints scale l2norm window design workspace workspace_bytes);
    layout!("terrace_gdn_decode_args", DecodeArgs, device tokens key_heads value_heads q k v g beta o cu_seqlens slots sequences
        pool scale l2norm);
    layout!("terrace_gdn_path", CPath, windows chunks launches table_bytes route arch why);
    for status in Status::ALL {
        writeln!(expect, "{} {}", status.name().to_str().unwrap(), status as u64).unwrap();
    }
    assert_eq!(succeeds(&mut Command::new(program)), expect);
}

/// The size of what a projection reaches, of a value that is all zeros.
fn size_of_field<T>(measure: impl Fn(&T) -> usize) -> usize {
    // SAFETY: every struct of the C face is numbers and pointers, which may all be zero.
    measure(&unsafe { std::mem::zeroed() })
}

#[test]
fn the_header_declares_what_the_library_exports_and_no_more() {
    let header = fs::read_to_string(root().join("kernels/include/terrace_gdn.h")).unwrap();
    let declared: BTreeSet<String> = declared(&header);
    assert!(declared.contains("terrace_gdn_prefill") && declared.contains("terrace_gdn_decode"), "{declared:?}");
    let Some(nm) = tool("nm") else { return };
    let text = succeeds(Command::new(nm).args(["-D", "--defined-only"]).arg(library()));
    let names = text.lines().filter_map(|line| line.split_whitespace().next_back());
    let exported: BTreeSet<String> = names.filter(|name| name.starts_with("terrace_")).map(str::to_owned).collect();
    assert_eq!(declared, exported);
}

/// A compiler, its standard, and the language it is told.
type Language = [&'static str; 3];
const C: Language = ["cc", "-std=c99", "c"];
const CPP: Language = ["g++", "-std=c++17", "c++"];

/// Compiles a program of `tests/c` and links it to the library; `None` is a skip.
fn program(name: &str, [compiler, standard, language]: Language) -> Option<PathBuf> {
    let test = std::thread::current().name().unwrap_or("main").replace("::", "-");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("ffi").join(test);
    fs::create_dir_all(&folder).unwrap();
    let output = folder.join(format!("{name}-{language}"));
    let mut command = Command::new(tool(compiler)?);
    // Fields that the initialiser leaves out are zero, which is what the header says they are.
    command.args(STRICT).args([standard, "-Wno-missing-field-initializers", "-x", language]);
    command.arg(root().join(format!("tests/c/{name}.c"))).args(["-x", "none"]);
    command.arg("-I").arg(root().join("kernels/include")).arg(library()).args(["-lm", "-pthread", "-o"]).arg(&output);
    succeeds(&mut command);
    Some(output)
}

/// The shared library: beside this test binary, or else built by the Cargo that builds this.
fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let name = format!("{}terrace_kernels{}", env::consts::DLL_PREFIX, env::consts::DLL_SUFFIX);
        let beside = env::current_exe().unwrap().parent().unwrap().join(&name);
        if beside.exists() {
            return beside;
        }
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("ffi-build");
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--offline", "-p", "terrace-kernels", "--target-dir"]).arg(&target);
        succeeds(cargo.current_dir(root()));
        target.join("debug").join(name)
    })
}
