//! The whole way: a profile in, a checked plan out, or the reason why it does not fit.

use std::collections::{HashMap, VecDeque};

use terrace_profiles::Profile;
use terrace_profiles::units::{Bytes, Offset};

use crate::bound::lower_bound;
use crate::check::{Violation, check};
use crate::error::Error;
use crate::lifetime;
use crate::options::Options;
use crate::plan::{Body, Plan, Proof, Slot};
use crate::problem::{Placement, Problem};
use crate::solve::{Control, Culprits, Solved, culprits, solve, solve_keeping};

/// The answer to a profile.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// A plan within the capacity, or the best plan where none was asked for.
    Fits(Box<Plan>),
    /// No plan within the capacity was found.
    DoesNotFit(Box<Refusal>),
}

/// Why a profile does not fit.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// What was asked for.
    pub capacity: Bytes,
    /// The best plan without the capacity: its lower bound and peak say which buffers need too much.
    pub best: Plan,
    /// Whether nothing can fit: the lower bound, or a finished search, says so. Otherwise a larger budget may find a plan.
    pub proven: bool,
    /// If so, buffers that alone do not fit.
    pub culprits: Option<Culprits>,
}

impl Verdict {
    /// The plan that fits, or the best one that does not.
    pub fn best(&self) -> &Plan {
        match self {
            Self::Fits(plan) => plan,
            Self::DoesNotFit(refusal) => &refusal.best,
        }
    }

    /// Whether the capacity, if any, was met.
    pub fn fits(&self) -> bool {
        matches!(self, Self::Fits(_))
    }
}

/// What has to be placed for a profile, without placing it.
///
/// # Errors
/// A profile that contradicts itself, or sizes that cannot be added up.
pub fn problem(profile: &Profile, options: &Options) -> Result<Problem, Error> {
    let (problem, _) = lifetime::problem(profile, &profile.lives()?, options)?;
    problem.validate()?;
    Ok(problem)
}

/// What an arena for a profile takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaSize {
    /// What it takes.
    pub bytes: Bytes,
    /// What no arena can do without.
    pub lower_bound: Bytes,
    /// Whether no smaller arena would do.
    pub optimal: bool,
}

/// How large the arena of a profile must be: the makespan of [`plan()`] with the same options, without making the plan or
/// reserving anything.
///
/// # Errors
/// As [`plan()`].
pub fn arena_size(profile: &Profile, options: &Options, control: &Control<'_>) -> Result<ArenaSize, Error> {
    let problem = problem(profile, options)?;
    let solved = solve(&problem, &options.within_spaces(), control)?;
    // The size is promised, so the placement behind it must be one.
    check(&problem, &solved.placement, None)?;
    let bytes = solved.placement.makespan(&problem);
    Ok(ArenaSize { bytes, lower_bound: lower_bound(&problem).bytes, optimal: solved.proof.optimal })
}

/// Plans the arena of a profile.
///
/// # Errors
/// A profile that contradicts itself, or sizes that cannot be added up; that it does not fit is no error.
pub fn plan(profile: &Profile, options: &Options, control: &Control<'_>) -> Result<Verdict, Error> {
    let options = &options.within_spaces();
    planned(profile, options, control, |problem, _| solve(problem, options, control))
}

/// Plans the arena of a profile that has changed a little since `old`: as [`plan()`], with the same makespan or a smaller
/// one, and as many buffers as possible where they were. Buffers have no identity across profiles: the k-th of a label and
/// size in one answers to the k-th of them in the other, and what is left over then by label alone.
///
/// The old plan is part of the question, but not of the plan's fingerprint.
///
/// # Errors
/// As [`plan()`].
pub fn replan(profile: &Profile, old: &Plan, options: &Options, control: &Control<'_>) -> Result<Verdict, Error> {
    let options = &options.within_spaces();
    planned(profile, options, control, |problem, openers| {
        let wishes = wishes(profile, old, problem, openers);
        let (mut solved, met) = solve_keeping(problem, &wishes, options, control)?;
        let (all, strategy) = (problem.buffers.len(), &solved.proof.strategy);
        solved.proof.strategy = format!("{strategy}, {met} of {all} offsets kept");
        Ok(solved)
    })
}

/// For each storage of the problem where its counterpart in the old plan lies; `openers` says which buffer opened each.
fn wishes(profile: &Profile, old: &Plan, problem: &Problem, openers: &[u32]) -> Vec<Option<Offset>> {
    let mut wishes = vec![None; problem.buffers.len()];
    let lives = profile.lives().unwrap_or_default();
    let label = |storage: usize| &profile.labels[lives[openers[storage] as usize].label.0 as usize];
    let mut seen = vec![false; old.problem().buffers.len()];
    let opened = |slot: &&Slot| !std::mem::replace(&mut seen[slot.storage as usize], true);
    let before: Vec<&Slot> = old.slots().iter().filter(opened).collect();
    let mut taken = vec![false; before.len()];
    for by_size in [true, false] {
        let size = |bytes: Bytes| by_size.then_some(bytes);
        let mut places: HashMap<(&str, Option<Bytes>), VecDeque<usize>> = HashMap::new();
        for (place, slot) in before.iter().enumerate().filter(|(place, _)| !taken[*place]) {
            places.entry((old.label(slot), size(old.size(slot)))).or_default().push_back(place);
        }
        for (storage, wish) in wishes.iter_mut().enumerate().filter(|(_, wish)| wish.is_none()) {
            let key = (label(storage).as_str(), size(problem.buffers[storage].size));
            if let Some(place) = places.get_mut(&key).and_then(VecDeque::pop_front) {
                *wish = Some(old.offset(before[place]));
                taken[place] = true;
            }
        }
    }
    wishes
}

/// Solves and, where nothing fits, asks why.
fn planned(
    profile: &Profile,
    options: &Options,
    control: &Control<'_>,
    solve: impl FnOnce(&Problem, &[u32]) -> Result<Solved, Error>,
) -> Result<Verdict, Error> {
    let mut refuted = false;
    let mut verdict = assemble(profile, options, |problem, storage_of| {
        let mut openers = vec![0; problem.buffers.len()];
        for (buffer, &storage) in storage_of.iter().enumerate().rev() {
            openers[storage as usize] = buffer as u32;
        }
        let solved = solve(problem, &openers)?;
        refuted = solved.refuted;
        Ok((solved.placement, solved.proof))
    })?;
    if let Verdict::DoesNotFit(refusal) = &mut verdict {
        refusal.proven |= refuted;
        let proven = refusal.proven.then(|| culprits(refusal.best.problem(), refusal.capacity, options, control));
        refusal.culprits = proven;
    }
    Ok(verdict)
}

/// The plan of a profile whose buffers already have their offsets, one for each in order of allocation, and whatever is
/// known about them: nothing is searched. That it is optimal is believed only up to the lower bound.
///
/// # Errors
/// As [`plan()`]; and offsets that are not one for each buffer, or that the check refuses.
pub fn placed(profile: &Profile, options: &Options, offsets: &[Offset], proof: Proof) -> Result<Verdict, Error> {
    assemble(profile, &options.within_spaces(), |problem, storage_of| {
        problem.validate()?;
        if offsets.len() != storage_of.len() {
            return Err(Violation::WrongCount { offsets: offsets.len(), buffers: storage_of.len() }.into());
        }
        // Aliases lie where the buffer that opened their storage does.
        let mut placement = Placement { offsets: vec![Offset::ZERO; problem.buffers.len()] };
        for (&storage, &offset) in storage_of.iter().zip(offsets).rev() {
            placement.offsets[storage as usize] = offset;
        }
        // Before anything is added to them.
        check(problem, &placement, None)?;
        Ok((placement, proof))
    })
}

fn assemble(
    profile: &Profile,
    options: &Options,
    place: impl FnOnce(&Problem, &[u32]) -> Result<(Placement, Proof), Error>,
) -> Result<Verdict, Error> {
    let lives = profile.lives()?;
    let (problem, storage_of) = lifetime::problem(profile, &lives, options)?;
    let (placement, proof) = place(&problem, &storage_of)?;
    let slots = lives.iter().zip(storage_of).map(|(life, storage)| Slot {
        bytes: life.bytes,
        label: life.label.0,
        lane: life.lane.0,
        birth: life.birth,
        death: crate::graph::end(life, options.free),
        freed: life.freed,
        storage,
    });
    let makespan = placement.makespan(&problem);
    let refused = options.capacity.filter(|capacity| makespan > *capacity);
    let body = Body {
        name: profile.name.clone(),
        notes: profile.notes.clone(),
        profile: profile.fingerprint(),
        options: Options { capacity: options.capacity.filter(|_| refused.is_none()), ..options.clone() },
        labels: profile.labels.clone(),
        lanes: profile.lanes.clone(),
        slots: slots.collect(),
        problem,
        placement,
        proof,
    };
    let plan = Plan::new(body)?;
    Ok(match refused {
        None => Verdict::Fits(Box::new(plan)),
        Some(capacity) => {
            let proven = plan.lower_bound().bytes > capacity || plan.proof().optimal;
            Verdict::DoesNotFit(Box::new(Refusal { capacity, best: plan, proven, culprits: None }))
        }
    })
}

#[cfg(test)]
mod tests {
    use terrace_profiles::Limits;
    use terrace_profiles::text::read_text;

    use super::*;

    fn two() -> Profile {
        let text = "terrace-profile 1\nname two\nlane s\nlabel x\na 0 1000 0\na 1 3000 0\nf 0\nf 1\n";
        read_text(&mut text.as_bytes(), "two", &Limits::default()).unwrap()
    }

    fn try_at(offsets: &[u64]) -> Result<Verdict, Error> {
        let offsets: Vec<Offset> = offsets.iter().map(|offset| Offset::new(*offset).unwrap()).collect();
        let proof = Proof { optimal: false, strategy: "given".to_owned(), nodes: 0, interrupted: false };
        placed(&two(), &Options::default(), &offsets, proof)
    }

    #[test]
    fn given_offsets_become_a_plan_if_the_check_accepts_them() {
        let verdict = try_at(&[4096, 0]).unwrap();
        assert_eq!((verdict.best().makespan().get(), verdict.best().lower_bound().bytes.get()), (5120, 4096));
        for (offsets, message) in [
            (&[0, 512][..], "the plan is not valid: buffers 0 and 1 both use byte 512 at tick 1"),
            (&[0, 1000], "the plan is not valid: buffer 1 lies at offset 1000, not a multiple of its alignment 512"),
            (&[0], "the plan is not valid: 1 offsets were given for 2 buffers"),
            (
                &[0, (1 << 63) - 512],
                "the plan is not valid: buffer 1 ends at byte 9223372036854778368, beyond the capacity of 9223372036854775807",
            ),
        ] {
            assert_eq!(try_at(offsets).unwrap_err().to_string(), message);
        }
    }

    #[test]
    fn the_size_is_that_of_the_plan() {
        let options = Options::default();
        let size = arena_size(&two(), &options, &Control::default()).unwrap();
        let verdict = plan(&two(), &options, &Control::default()).unwrap();
        let plan = verdict.best();
        let wanted = (plan.makespan(), plan.lower_bound().bytes, plan.proof().optimal);
        assert_eq!((size.bytes, size.lower_bound, size.optimal), wanted);
    }

    #[test]
    fn what_a_plan_says_placed_again_is_that_plan() {
        let options = Options::default();
        let Verdict::Fits(first) = plan(&two(), &options, &Control::default()).unwrap() else { panic!("no capacity") };
        let offsets: Vec<Offset> = first.slots().iter().map(|slot| first.offset(slot)).collect();
        let again = placed(&two(), &options, &offsets, first.proof().clone()).unwrap();
        assert_eq!(again.best(), &*first);
    }
}
