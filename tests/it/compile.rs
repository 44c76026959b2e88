//! Every kernel compiles for every architecture that it ships for, on a machine without a GPU; and what the compiler says of
//! registers, spills and shared memory stays inside the limits of the architecture.
//!
//! NVRTC is found as in `kernels/src/compile.rs`; `.ci/nvrtc` fetches it. Without it these tests say so and skip, and where
//! `REQUIRE_NVRTC=1` promises it, as in CI, they fail.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use terrace_kernels::compile::{CompileError, Compiled, Compiler, Usage, usage};
use terrace_kernels::source::Unit;
use terrace_kernels::tile::{Arch, Element, Entry};

#[derive(Clone, Copy, Debug)]
struct Job {
    unit: Unit,
    arch: Arch,
    element: Element,
}

#[test]
fn every_kernel_compiles_for_every_architecture_within_its_limits() {
    let Some(compiler) = nvrtc() else { return };
    let mut jobs = Vec::new();
    for unit in Unit::ALL {
        for arch in Arch::ALL {
            jobs.extend(Element::ALL.map(|element| Job { unit, arch, element }));
        }
    }
    let started = Instant::now();
    let mut table = String::new();
    let mut wrong = Vec::new();
    for (job, compiled) in compile_all(&compiler, &jobs) {
        match compiled {
            Err(error) => wrong.push(format!("{:?}: {error}", job.element)),
            Ok(compiled) if job.arch == Arch::Ptx80 => check_ptx(job, &compiled),
            Ok(compiled) => check_cubin(job, &compiled, &mut table, &mut wrong),
        }
    }
    println!("NVRTC {}: {} compilations in {:.1?}\n{table}", compiler.version(), jobs.len(), started.elapsed());
    assert!(wrong.is_empty(), "{}\n{table}", wrong.join("\n"));
}

/// Each job's code, in the order of the jobs. Two at a time: the machines that run this have two processors.
fn compile_all(compiler: &Compiler, jobs: &[Job]) -> Vec<(Job, Result<Compiled, CompileError>)> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _worker in 0..2 {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(job) = jobs.get(at) else { return };
                    let compiled = compiler.compile(job.unit, job.arch, job.element);
                    done.lock().unwrap().push((at, (*job, compiled)));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap();
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, compiled)| compiled).collect()
}

fn check_ptx(job: Job, compiled: &Compiled) {
    let text = std::str::from_utf8(&compiled.image).unwrap();
    assert!(text.ends_with('\0'), "{job:?}: the driver looks for the end");
    assert!(text.contains(".target sm_80"), "{job:?}");
    for entry in job.unit.entries(job.arch) {
        let name = entry.name().to_str().unwrap();
        assert!(text.contains(&format!(".entry {name}(")), "{job:?}: {name}");
    }
}

fn check_cubin(job: Job, compiled: &Compiled, table: &mut String, wrong: &mut Vec<String>) {
    let Job { unit, arch, element } = job;
    assert_eq!(compiled.image[..4], *b"\x7fELF", "{job:?}");
    let said = usage(&compiled.log);
    let expected: BTreeSet<&str> = unit.entries(arch).iter().map(|entry| entry.name().to_str().unwrap()).collect();
    let named: BTreeSet<&str> = said.iter().map(|kernel| kernel.entry.as_str()).collect();
    assert_eq!(named, expected, "{job:?}\n{}", compiled.log);
    for entry in unit.entries(arch) {
        let name = entry.name().to_str().unwrap();
        let kernel = said.iter().find(|kernel| kernel.entry == name).unwrap();
        let Usage { registers, spilled, stack, shared, .. } = *kernel;
        let all = shared + entry.dynamic_shared(arch);
        let _ = writeln!(
            table,
            "{arch:8} {element:?} {name:18} {registers:3} registers, {spilled} spilled, {all:6} B shared"
        );
        let mut hold = |is_so: bool, what: &str| {
            if !is_so {
                wrong.push(format!("{name} for {arch}, {element:?}: {what}"));
            }
        };
        hold(registers > 0, "the log does not say how many registers");
        // What it says of wgmma that it had to run one by one.
        hold(!compiled.log.contains("Potential Performance Loss"), &compiled.log);
        hold(spilled == 0, &format!("{spilled} bytes spilled"));
        hold(stack == 0, &format!("{stack} bytes of stack"));
        hold(all <= arch.shared_limit(), &format!("{all} bytes of shared memory, of {}", arch.shared_limit()));
        // What a launch would be refused for.
        hold(registers.next_multiple_of(8) * entry.threads() <= 65_536, "more registers than a processor has");
    }
}

#[test]
fn every_architecture_has_its_published_limit() {
    // Of a block, on the data sheets: 99 KB on consumer and inference parts, 163 KB on A100, 227 KB from Hopper on.
    let limit = |arch: Arch| arch.shared_limit() >> 10;
    assert_eq!([Arch::Sm86, Arch::Sm89, Arch::Sm120a, Arch::Ptx80].map(limit), [99; 4]);
    assert_eq!([Arch::Sm80, Arch::Sm90a, Arch::Sm100a].map(limit), [163, 227, 227]);
}

#[test]
fn the_kernels_of_both_units_have_names_of_their_own() {
    let entries: Vec<Entry> = Unit::ALL.into_iter().flat_map(|unit| unit.entries(Arch::Sm90a)).collect();
    let names: BTreeSet<_> = entries.iter().map(|entry| entry.name()).collect();
    assert_eq!(names.len(), entries.len());
    for unit in Unit::ALL {
        let text = unit.text(Arch::Sm80);
        assert!(!text.contains("#include"), "{}: there is nothing to include where it is compiled", unit.name());
        assert!(text.contains("static_assert(sizeof("), "{}: its layout is held", unit.name());
    }
}

/// The compiler, or `None` after a line that says why there is none.
fn nvrtc() -> Option<Arc<Compiler>> {
    match Compiler::get() {
        Ok(compiler) => Some(compiler),
        Err(reason) if std::env::var("REQUIRE_NVRTC").is_ok_and(|value| value == "1") => {
            panic!("REQUIRE_NVRTC=1, but {reason}")
        }
        Err(reason) => {
            // Around the capture of the test harness: a skip that nobody reads is a silent one.
            let _ = std::io::Write::write_all(
                &mut std::io::stderr(),
                format!("SKIP no kernel is compiled: {reason}\n").as_bytes(),
            );
            None
        }
    }
}
