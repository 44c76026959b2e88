//! The whole way: a profile in, a checked plan out, or the reason why it does not fit.

use terrace_profiles::Profile;
use terrace_profiles::units::Bytes;

use crate::error::Error;
use crate::lifetime;
use crate::options::Options;
use crate::plan::{Body, Plan, Slot};
use crate::problem::Problem;
use crate::solve::{Control, solve};

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

/// Plans the arena of a profile.
///
/// # Errors
/// A profile that contradicts itself, or sizes that cannot be added up; that it does not fit is no error.
pub fn plan(profile: &Profile, options: &Options, control: &Control<'_>) -> Result<Verdict, Error> {
    let lives = profile.lives()?;
    let (problem, storage_of) = lifetime::problem(profile, &lives, options)?;
    let solved = solve(&problem, options, control)?;
    let slots = lives.iter().zip(storage_of).map(|(life, storage)| Slot {
        bytes: life.bytes,
        label: life.label.0,
        lane: life.lane.0,
        birth: life.birth,
        death: crate::graph::end(life, options.free),
        freed: life.freed,
        storage,
    });
    let makespan = solved.placement.makespan(&problem);
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
        placement: solved.placement,
        proof: solved.proof,
    };
    let plan = Plan::new(body)?;
    Ok(match refused {
        None => Verdict::Fits(Box::new(plan)),
        Some(capacity) => {
            let proven = plan.lower_bound().bytes > capacity || plan.proof().optimal;
            Verdict::DoesNotFit(Box::new(Refusal { capacity, best: plan, proven }))
        }
    })
}
