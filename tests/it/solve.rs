//! The solvers against oracles: never better than the optimum, equal to it when they say so, and every placement valid.

use terrace_planner::check::{Violation, check};
use terrace_planner::problem::{Placement, Problem};
use terrace_planner::solve::{Control, Solved, culprits, solve, solve_keeping, solve_with, strategy_names};
use terrace_planner::spaces::Space;
use terrace_planner::{Options, Plan, Verdict, bound, plan, replan};
use terrace_profiles::units::{Align, Bytes, Offset};
use terrace_tests::generate::{self, Features, Random};
use terrace_tests::{corpus, oracle};

fn options(budget_nodes: u64) -> Options {
    Options { align: Align::ONE, budget_nodes, ..Options::default() }
}

fn offsets(placement: &Placement) -> Vec<u64> {
    placement.offsets.iter().map(|offset| offset.get()).collect()
}

fn two_threads() -> Control<'static> {
    Control { threads: 2, ..Control::default() }
}

/// Solves and holds the answer against the optimum that an oracle knows.
fn against_optimum(problem: &Problem, optimum: u64, case: &str) -> Solved {
    against_optimum_within(20_000, problem, optimum, case)
}

fn against_optimum_within(budget_nodes: u64, problem: &Problem, optimum: u64, case: &str) -> Solved {
    let solved = solve(problem, &options(budget_nodes), &two_threads()).unwrap();
    let makespan = solved.placement.makespan(problem).get();
    assert_eq!(check(problem, &solved.placement, None), Ok(()), "{case}");
    assert!(oracle::is_valid(problem, &offsets(&solved.placement)), "{case}");
    assert!(makespan >= optimum, "{case}: {makespan} is better than the optimum {optimum}");
    assert!(bound::lower_bound(problem).bytes.get() <= optimum, "{case}: the bound is above the optimum");
    if solved.proof.optimal {
        assert_eq!(makespan, optimum, "{case}: claimed optimal");
    }
    solved
}

#[test]
fn up_to_eight_buffers_are_solved_to_the_optimum_that_all_orders_of_first_fit_give() {
    let mut proven = 0;
    for seed in 0..400 {
        let mut random = Random::new(seed);
        let count = 1 + random.below(8) as usize;
        let problem = generate::problem(&mut random, count, 12, 10, Features::default());
        let solved = against_optimum(&problem, oracle::ordered_optimum(&problem), &format!("seed {seed}"));
        proven += u32::from(solved.proof.optimal);
    }
    assert_eq!(proven, 400, "small plain problems are always proven");
}

#[test]
fn constraints_hold_and_optima_agree_with_all_orders_of_first_fit() {
    let all =
        Features { aligns: true, gaps: true, fixed: true, lanes: false, apart: true, windows: false, reserved: true };
    let each = [
        Features { aligns: true, ..Features::default() },
        Features { gaps: true, ..Features::default() },
        Features { fixed: true, ..Features::default() },
        Features { apart: true, ..Features::default() },
        Features { reserved: true, ..Features::default() },
        Features { reserved: true, aligns: true, gaps: true, ..Features::default() },
        Features { lanes: true, reserved: true, ..Features::default() },
        Features { lanes: true, aligns: true, gaps: true, ..Features::default() },
        all,
    ];
    for (kind, features) in each.into_iter().enumerate() {
        for seed in 0..120 {
            let mut random = Random::new(1000 * kind as u64 + seed);
            let count = 1 + random.below(7) as usize;
            let problem = generate::problem(&mut random, count, 9, 9, features);
            against_optimum(&problem, oracle::ordered_optimum(&problem), &format!("{features:?} seed {seed}"));
        }
    }
}

#[test]
fn partly_used_buffers_agree_with_trying_every_offset() {
    let features = Features { gaps: true, windows: true, ..Features::default() };
    for seed in 0..150 {
        let mut random = Random::new(seed);
        let count = 1 + random.below(4) as usize;
        let problem = generate::problem(&mut random, count, 5, 9, features);
        against_optimum(&problem, oracle::exhaustive_optimum(&problem), &format!("seed {seed}"));
    }
}

#[test]
fn the_two_oracles_agree() {
    for seed in 0..60 {
        let mut random = Random::new(seed);
        let features =
            Features { aligns: true, gaps: true, apart: true, reserved: seed % 2 == 0, ..Features::default() };
        let problem = generate::problem(&mut random, 4, 4, 6, features);
        assert_eq!(oracle::exhaustive_optimum(&problem), oracle::ordered_optimum(&problem), "seed {seed}");
    }
}

#[test]
fn every_strategy_passes_the_check_on_random_problems_with_every_constraint() {
    let features =
        Features { aligns: true, gaps: true, windows: true, fixed: true, lanes: false, apart: true, reserved: true };
    for seed in 0..40 {
        let mut random = Random::new(seed);
        let problem = generate::problem(&mut random, 40, 50, 30, features);
        for strategy in strategy_names() {
            let Some(solved) = solve_with(&strategy, &problem, &options(2_000), &two_threads()).unwrap() else {
                continue;
            };
            assert_eq!(check(&problem, &solved.placement, None), Ok(()), "{strategy} seed {seed}");
            assert!(oracle::is_valid(&problem, &offsets(&solved.placement)), "{strategy} seed {seed}");
        }
    }
}

/// The problem of a file of the corpus.
fn problem_of(path: &std::path::Path, align: Align) -> Problem {
    terrace_planner::problem_of(&corpus::read(path), &Options { align, ..Options::default() }).unwrap()
}

#[test]
fn every_strategy_passes_the_check_on_every_file_of_the_corpus() {
    let instances = corpus::instances().into_iter().map(|path| (path, Align::ONE));
    let recorded = corpus::recorded().into_iter().map(|path| (path, Align::DEFAULT));
    for (path, align) in instances.chain(recorded) {
        let problem = problem_of(&path, align);
        let bound = bound::lower_bound(&problem).bytes;
        let mut tried = 0;
        for strategy in strategy_names() {
            // The search of large parts is tried on a few hundred nodes only: each strategy must be valid, not good.
            let Some(solved) = solve_with(&strategy, &problem, &options(300), &two_threads()).unwrap() else {
                continue;
            };
            assert_eq!(check(&problem, &solved.placement, None), Ok(()), "{strategy} on {}", path.display());
            assert!(solved.placement.makespan(&problem) >= bound, "{strategy} on {}", path.display());
            tried += 1;
        }
        assert!(tried >= 9, "the dives at least answer on {}", path.display());
    }
}

#[test]
fn every_recorded_forward_is_planned_at_the_lower_bound_and_proven() {
    for path in corpus::recorded() {
        let profile = corpus::read(&path);
        let solved = |threads| {
            let control = Control { threads, ..Control::default() };
            match plan(&profile, &Options::default(), &control).unwrap() {
                Verdict::Fits(plan) => *plan,
                Verdict::DoesNotFit(_) => unreachable!("no capacity was asked for"),
            }
        };
        let one = solved(1);
        assert!(one.proof().optimal, "{}", path.display());
        assert_eq!(one.makespan(), one.lower_bound().bytes, "{}", path.display());
        let bytes = one.encode().unwrap();
        assert_eq!(solved(2).encode().unwrap(), bytes, "two threads, {}", path.display());
        assert_eq!(solved(1).encode().unwrap(), bytes, "a second run, {}", path.display());
        assert_eq!(Plan::decode("again", &bytes).unwrap(), one, "{}", path.display());
    }
}

#[test]
fn public_instances_reach_what_was_promised() {
    // Name and the most that is accepted, in bytes, with no search.
    for (name, most) in [
        ("G_1", 3_030_937_746),
        ("resnet50", 1_515_472_556),
        ("Y_1", 497_261_190_115),
        ("iopddl-B-max", 418_691_216),
        ("iopddl-P-max", 2_607_551_487_230),
        ("xfmr-train-64l", 37_855_690_752),
        ("xfmr-infer-64l", 604_351_488),
        ("pangu_2.6B", 5_572_042_815),
        ("S_1", 1_501_400_000),
        ("synth-10k", 537_600_000),
    ] {
        let path = corpus::instances().into_iter().find(|path| path.to_string_lossy().contains(name)).unwrap();
        let problem = problem_of(&path, Align::ONE);
        let solved = solve(&problem, &options(0), &two_threads()).unwrap();
        let makespan = solved.placement.makespan(&problem).get();
        assert!(makespan <= most, "{name}: {makespan} > {most}");
    }
}

/// The instances of minimalloc's paper, A to K, with their letters.
fn challenging() -> Vec<(char, Problem)> {
    let paths = corpus::instances().into_iter().filter(|path| path.to_string_lossy().contains("1048576"));
    let letter = |path: &std::path::Path| path.file_name().unwrap().to_string_lossy().chars().next().unwrap();
    let mut problems: Vec<_> = paths.map(|path| (letter(&path), problem_of(&path, Align::ONE))).collect();
    problems.sort_by_key(|(letter, _)| *letter);
    assert_eq!(problems.iter().map(|(letter, _)| letter).collect::<String>(), "ABCDEFGHIJK");
    problems
}

#[test]
fn a_to_k_fit_into_a_mebibyte_within_few_nodes() {
    let capacity = Bytes::new(1 << 20);
    let mut nodes = 0;
    for (letter, problem) in challenging() {
        let solved = solve(&problem, &Options { capacity, ..options(1_000_000) }, &two_threads()).unwrap();
        assert_eq!(check(&problem, &solved.placement, capacity), Ok(()), "{letter}");
        nodes += solved.proof.nodes;
    }
    // 442,000 is what a prototype of minimalloc's own search took.
    assert!(nodes <= 250_000, "{nodes} nodes");
}

#[test]
fn nine_of_a_to_k_are_proven_optimal() {
    for (letter, problem) in challenging() {
        let optimum = if letter == 'C' { 1_039_360 } else { 1 << 20 };
        if !['D', 'J'].contains(&letter) {
            let solved = against_optimum_within(1_000_000, &problem, optimum, &letter.to_string());
            assert!(solved.proof.optimal, "{letter}");
        }
    }
}

#[test]
fn threads_never_change_the_answer() {
    for path in corpus::instances().into_iter().filter(|path| path.to_string_lossy().contains("minimalloc")) {
        let problem = problem_of(&path, Align::ONE);
        let run = |threads| solve(&problem, &options(3_000), &Control { threads, ..Control::default() }).unwrap();
        let one = run(1);
        for threads in [2, 3, 8] {
            assert_eq!(run(threads), one, "{threads} threads on {}", path.display());
        }
    }
}

#[test]
fn a_mutated_placement_is_always_rejected() {
    let mut mutants = 0;
    for seed in 0..200 {
        let mut random = Random::new(seed);
        let features =
            Features { aligns: seed % 2 == 0, gaps: seed % 3 == 0, fixed: seed % 5 == 0, ..Features::default() };
        let problem = generate::problem(&mut random, 12, 16, 10, features);
        let solved = solve(&problem, &options(500), &two_threads()).unwrap();
        for _ in 0..20 {
            let (mut problem, mut placement) = (problem.clone(), solved.placement.clone());
            mutate(&mut random, &mut problem, &mut placement);
            let verdict = check(&problem, &placement, None);
            assert_eq!(verdict.is_ok(), oracle::is_valid(&problem, &offsets(&placement)), "seed {seed}: {verdict:?}");
            mutants += u32::from(verdict.is_err());
        }
    }
    assert!(mutants > 2_000, "most mutations break a rule, {mutants} did");
}

/// Changes one offset, size or lifetime.
fn mutate(random: &mut Random, problem: &mut Problem, placement: &mut Placement) {
    let index = random.below(problem.buffers.len() as u64) as usize;
    let buffer = &mut problem.buffers[index];
    match random.below(3) {
        0 => {
            let offset = placement.offsets[index].get();
            let moved =
                if random.below(2) == 0 { offset.saturating_sub(1 + random.below(4)) } else { random.below(40) };
            placement.offsets[index] = Offset::new(moved).unwrap();
        }
        1 if buffer.pieces.is_empty() => {
            buffer.size = Bytes::new(buffer.size.get() + 1 + random.below(8)).unwrap();
        }
        _ if buffer.pieces.is_empty() => {
            buffer.lifetime.start.0 = buffer.lifetime.start.0.saturating_sub(1 + random.below(6));
            buffer.lifetime.end.0 += random.below(6);
        }
        _ => buffer.pieces = Box::default(),
    }
}

#[test]
fn a_plan_one_byte_over_its_capacity_is_rejected() {
    let mut random = Random::new(7);
    let problem = generate::problem(&mut random, 12, 16, 10, Features::default());
    let placement = solve(&problem, &options(500), &two_threads()).unwrap().placement;
    let makespan = placement.makespan(&problem);
    assert_eq!(check(&problem, &placement, Some(makespan)), Ok(()));
    let less = Bytes::new(makespan.get() - 1);
    assert!(matches!(check(&problem, &placement, less), Err(Violation::OverCapacity { .. })));
}

#[test]
fn a_capacity_below_the_bound_is_refused_with_its_witness() {
    let profile = corpus::read(&corpus::root().join("profiles/recorded/qwen3.6-27b-prefill-60000.profile"));
    let capacity = Bytes::new(8 << 30);
    let verdict = plan(&profile, &Options { capacity, ..Options::default() }, &two_threads()).unwrap();
    let Verdict::DoesNotFit(refusal) = verdict else { panic!("16 GB do not fit in 8 GiB") };
    assert!(refusal.proven);
    let bound = refusal.best.lower_bound();
    assert_eq!(bound.bytes.get(), 16_209_794_048);
    let witness = &bound.witness[0];
    let sizes = witness.buffers.iter().map(|&index| refusal.best.problem().buffers[index as usize].size.get());
    assert_eq!(sizes.sum::<u64>(), bound.bytes.get(), "the witness adds up to the bound");
    let culprits = refusal.culprits.expect("a refutation names its culprits");
    let mut sizes: Vec<u64> =
        culprits.buffers.iter().map(|&index| refusal.best.problem().buffers[index as usize].size.get()).collect();
    sizes.sort_unstable();
    assert!(culprits.minimal && sizes.iter().sum::<u64>() > 8 << 30);
    assert!(sizes[1..].iter().sum::<u64>() <= 8 << 30, "without the smallest they fit");
}

/// The problem of some of the buffers.
fn only(problem: &Problem, keep: &[u32]) -> Problem {
    let place = |index: u32| keep.iter().position(|&kept| kept == index).map(|at| at as u32);
    Problem {
        buffers: keep.iter().map(|&index| problem.buffers[index as usize].clone()).collect(),
        apart: problem.apart.iter().filter_map(|&(a, b)| Some((place(a)?, place(b)?))).collect(),
        reserved: problem.reserved.clone(),
    }
}

#[test]
fn culprits_cannot_fit_and_each_of_them_is_needed() {
    let each = [
        Features::default(),
        Features { aligns: true, ..Features::default() },
        Features { gaps: true, fixed: true, ..Features::default() },
        Features { reserved: true, ..Features::default() },
        Features { apart: true, aligns: true, ..Features::default() },
    ];
    let (mut by_load, mut by_search) = (0, 0);
    for (kind, features) in each.into_iter().enumerate() {
        for seed in 0..150 {
            let mut random = Random::new(7000 * kind as u64 + seed);
            let count = 2 + random.below(6) as usize;
            let problem = generate::problem(&mut random, count, 9, 9, features);
            let optimum = oracle::ordered_optimum(&problem);
            let Some(capacity) = optimum.checked_sub(1).and_then(Bytes::new) else { continue };
            let options = Options { capacity: Some(capacity), ..options(20_000) };
            let solved = solve(&problem, &options, &two_threads()).unwrap();
            assert!(solved.refuted, "{features:?} seed {seed}");
            let found = culprits(&problem, capacity, &options, &two_threads());
            let what = format!("{features:?} seed {seed}: {found:?} of {problem:?} in {capacity}");
            assert!(oracle::ordered_optimum(&only(&problem, &found.buffers)) > capacity.get(), "{what}");
            assert!(found.minimal, "{what}");
            for &spared in &found.buffers {
                let rest: Vec<u32> = found.buffers.iter().copied().filter(|&index| index != spared).collect();
                assert!(oracle::ordered_optimum(&only(&problem, &rest)) <= capacity.get(), "{spared} in {what}");
            }
            let loaded = bound::lower_bound(&problem).bytes > capacity;
            (by_load, by_search) = (by_load + u32::from(loaded), by_search + u32::from(!loaded));
        }
    }
    assert!(by_load > 300 && by_search > 20, "{by_load} by load, {by_search} by search");
}

/// The most wishes that any placement meets that ends at or below `room`.
fn most_kept(problem: &Problem, wishes: &[Option<Offset>], room: u64) -> usize {
    let subsets = 0_u32..1 << problem.buffers.len();
    let pinned = subsets.filter_map(|subset| {
        let mut problem = problem.clone();
        for (index, buffer) in problem.buffers.iter_mut().enumerate().filter(|(index, _)| subset >> index & 1 == 1) {
            buffer.fixed = Some(wishes[index].filter(|wish| wish.is_aligned(buffer.align))?);
        }
        let fixed: Vec<u32> = (0..problem.buffers.len() as u32).filter(|index| subset >> index & 1 == 1).collect();
        let offsets: Vec<u64> = fixed.iter().map(|&index| wishes[index as usize].unwrap().get()).collect();
        let fits = oracle::is_valid(&only(&problem, &fixed), &offsets) && oracle::ordered_optimum(&problem) <= room;
        fits.then_some(fixed.len())
    });
    pinned.max().unwrap_or(0)
}

#[test]
fn a_plan_made_again_keeps_nearly_all_that_can_stay_and_costs_nothing() {
    let (mut kept, mut possible) = (0, 0);
    for seed in 0..150 {
        let mut random = Random::new(seed);
        let mut features = Features { aligns: seed % 2 == 0, gaps: seed % 3 == 0, ..Features::default() };
        (features.lanes, features.reserved) = (seed % 5 == 0, seed % 7 == 0);
        let before = generate::problem(&mut random, 6, 8, 9, features);
        let old = solve(&before, &options(5_000), &two_threads()).unwrap();
        let (mut after, mut moved) = (before.clone(), old.placement.clone());
        mutate(&mut random, &mut after, &mut moved);
        let fresh = solve(&after, &options(5_000), &two_threads()).unwrap();
        let wishes: Vec<Option<Offset>> = old.placement.offsets.iter().copied().map(Some).collect();
        let (solved, met) = solve_keeping(&after, &wishes, &options(5_000), &two_threads()).unwrap();
        let room = fresh.placement.makespan(&after);
        assert_eq!(check(&after, &solved.placement, Some(room)), Ok(()), "seed {seed}");
        let stayed = solved.placement.offsets.iter().zip(&old.placement.offsets).filter(|(new, old)| new == old);
        assert_eq!(met, stayed.count(), "seed {seed}");
        kept += met;
        possible += most_kept(&after, &wishes, room.get());
    }
    assert!(kept <= possible && kept * 100 >= possible * 97, "{kept} kept, {possible} could be");
}

/// Whether buffers can be dealt to pieces of memory so that each deals with its own, by trying every deal.
fn can_be_dealt(problem: &Problem, pieces: &[u64]) -> bool {
    let (count, ways) = (problem.buffers.len() as u32, pieces.len() as u64);
    (0..ways.pow(count)).any(|deal| {
        (0..ways).all(|piece| {
            let own: Vec<u32> = (0..count).filter(|&index| deal / ways.pow(index) % ways == piece).collect();
            oracle::ordered_optimum(&only(problem, &own)) <= pieces[piece as usize]
        })
    })
}

#[test]
fn several_memories_hold_what_some_deal_between_them_holds_and_nothing_else() {
    let (mut fits, mut refuted) = (0, 0);
    for seed in 0..600 {
        let mut random = Random::new(seed);
        let profile = generate::profile(&mut random, 6, 32);
        let mut bytes = |least: u64| Bytes::new(least + random.below(40)).unwrap();
        let spaces =
            vec![Space { capacity: bytes(24), segment: None }, Space { capacity: bytes(30), segment: Some(bytes(24)) }];
        let mut pieces = vec![spaces[0].capacity.get()];
        let (mut left, segment) = (spaces[1].capacity.get(), spaces[1].segment.unwrap().get());
        while left > 0 {
            pieces.push(left.min(segment));
            left -= left.min(segment);
        }
        let options = Options { spaces, ..options(20_000) };
        let Ok(verdict) = plan(&profile, &options, &two_threads()) else { continue };
        let plain = Problem { reserved: Vec::new(), ..verdict.best().problem().clone() };
        assert_eq!(verdict.fits(), can_be_dealt(&plain, &pieces), "seed {seed}: {pieces:?} for {plain:?}");
        match verdict {
            Verdict::Fits(_) => fits += 1,
            Verdict::DoesNotFit(refusal) => {
                assert!(refusal.proven, "seed {seed}");
                refuted += 1;
            }
        }
    }
    assert!(fits > 50 && refuted > 20, "{fits} fit, {refuted} do not");
}

#[test]
fn nothing_moves_where_nothing_changed_and_little_where_one_buffer_grew() {
    for path in corpus::recorded() {
        let profile = corpus::read(&path);
        let Verdict::Fits(old) = plan(&profile, &Options::default(), &two_threads()).unwrap() else { unreachable!() };
        let again = replan(&profile, &old, &Options::default(), &two_threads()).unwrap();
        assert_eq!(again.best().placement(), old.placement(), "{}", path.display());
        let mut grown = old.problem().clone();
        let smallest = (0..grown.buffers.len()).min_by_key(|&index| grown.buffers[index].size).unwrap();
        let buffer = &mut grown.buffers[smallest];
        buffer.size = Bytes::new(buffer.size.get() + buffer.align.get()).unwrap();
        let wishes: Vec<Option<Offset>> = old.placement().offsets.iter().copied().map(Some).collect();
        let fresh = solve(&grown, &Options::default(), &two_threads()).unwrap();
        let (solved, met) = solve_keeping(&grown, &wishes, &Options::default(), &two_threads()).unwrap();
        let all = grown.buffers.len();
        let unmoved = fresh.placement.offsets.iter().zip(&old.placement().offsets).filter(|(a, b)| a == b).count();
        assert!(solved.placement.makespan(&grown) <= fresh.placement.makespan(&grown), "{}", path.display());
        assert!(met >= unmoved && met * 10 >= all * 9, "{met} of {all}, {unmoved} afresh: {}", path.display());
    }
}

#[test]
fn a_profile_that_fits_is_planned_under_its_capacity() {
    let profile = corpus::read(&corpus::root().join("profiles/recorded/qwen3.6-27b-prefill-60000.profile"));
    let capacity = Bytes::new(16 << 30);
    let verdict = plan(&profile, &Options { capacity, ..Options::default() }, &two_threads()).unwrap();
    let Verdict::Fits(plan) = verdict else { panic!("16.2 GB fit in 16 GiB") };
    assert!(plan.makespan() <= capacity.unwrap());
}
