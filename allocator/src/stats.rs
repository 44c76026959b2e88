//! What happened so far, in numbers: as JSON, and as text for Prometheus.
//!
//! Nothing here knows the time: a clock on the path of a request costs more than the request. Whoever asks knows how long it
//! has been, see [`Stats::events_per_second`].

use std::fmt::Write;

use serde::Serialize;

use crate::divergence::Counts;

/// Figures of a device since it was opened. Bytes unless the name says otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Stats {
    /// Size of the one reservation.
    pub reservation: u64,
    /// Steps begun.
    pub steps: u64,
    /// Steps that ran exactly as planned.
    pub steps_on_script: u64,
    /// Requests inside steps that have ended.
    pub allocs: u64,
    /// Requests and frees inside steps that have ended.
    pub events: u64,
    /// Requests that took the long way: not answered from a script.
    pub slow_allocs: u64,
    /// Requests inside steps whose key was seen before, without those that outlived their step.
    pub replay_allocs: u64,
    /// Those of them served in plan.
    pub hits: u64,
    /// The same for keys seen twice before.
    pub replay_allocs_warm: u64,
    /// Those of them served in plan.
    pub hits_warm: u64,
    /// How often each divergence happened.
    pub divergences: Counts,
    /// In use outside plans now.
    pub outside: u64,
    /// The most that was, since the device was opened or [`Device::reset_peak`](crate::Device::reset_peak).
    pub outside_peak: u64,
    /// Of that, what a plan should have served: now.
    pub overflow: u64,
    /// The most that ever was.
    pub overflow_peak: u64,
    /// The largest plan so far: the plans' part of the reservation.
    pub arena: u64,
    /// The largest load of any step, counting what was freed inside it: no arena could have been smaller.
    pub lower_bound: u64,
    /// Plans made.
    pub plans: u64,
    /// Time spent waiting for them, in nanoseconds.
    pub plan_ns: u64,
    /// Buffers whose redzone was found damaged.
    pub redzones_damaged: u64,
}

impl Stats {
    /// A step of a key seen `before` times ended: of `inside` requests that lived in it, `hits` were served in plan.
    pub(crate) fn served(&mut self, before: u64, hits: u64, inside: u64) {
        if before >= 1 {
            self.replay_allocs += inside;
            self.hits += hits;
        }
        if before >= 2 {
            self.replay_allocs_warm += inside;
            self.hits_warm += hits;
        }
    }

    pub(crate) fn outside_taken(&mut self, size: u64, missed: bool) {
        self.outside += size;
        self.outside_peak = self.outside_peak.max(self.outside);
        if missed {
            self.overflow += size;
            self.overflow_peak = self.overflow_peak.max(self.overflow);
        }
    }

    pub(crate) fn outside_given(&mut self, size: u64, missed: bool) {
        self.outside -= size;
        if missed {
            self.overflow -= size;
        }
    }
}

/// The kinds of Prometheus' metrics that are used.
const COUNTER: &str = "counter";
const GAUGE: &str = "gauge";

impl Stats {
    /// What the largest plan needs beyond the largest load: bytes that only a better plan, or fewer kinds of steps, could save.
    pub fn waste(&self) -> u64 {
        self.arena.saturating_sub(self.lower_bound)
    }

    /// The share of requests served in plan, of those whose key was seen before; 1 where there were none.
    pub fn hit_rate(&self) -> f64 {
        if self.replay_allocs == 0 { 1.0 } else { self.hits as f64 / self.replay_allocs as f64 }
    }

    /// Requests and frees inside steps that have ended; take the difference over a time for a rate.
    pub fn events(&self) -> u64 {
        self.events
    }

    /// The rate of events since the device was opened, or over the time in which `self` counted; 0 in no time.
    pub fn events_per_second(&self, elapsed_seconds: f64) -> f64 {
        if elapsed_seconds > 0.0 { self.events as f64 / elapsed_seconds } else { 0.0 }
    }

    /// One JSON object: the fields, and what is derived from them.
    pub fn to_json(&self) -> String {
        #[derive(Serialize)]
        struct All<'a> {
            #[serde(flatten)]
            stats: &'a Stats,
            waste: u64,
            hit_rate: f64,
            divergences_total: u64,
        }
        let (waste, hit_rate, divergences_total) = (self.waste(), self.hit_rate(), self.divergences.total());
        crate::report::json(&All { stats: self, waste, hit_rate, divergences_total })
    }

    /// The figures in Prometheus' text format, each with `labels`, such as `[("device", "0")]`. What no label's name may hold
    /// becomes `_`; a label named `kind` becomes `exported_kind`, since the divergences have one of their own.
    pub fn to_prometheus(&self, labels: &[(&str, &str)]) -> String {
        let labels = label_pairs(labels);
        let mut text = String::new();
        for (name, kind, help, value) in self.metrics() {
            head(&mut text, name, kind, help);
            sample(&mut text, name, &labels, &value);
        }
        let name = "terrace_divergences_total";
        head(&mut text, name, COUNTER, "Ways in which steps and frees differed from their plan.");
        for (kind, count) in self.divergences.each() {
            let kind = format!("kind=\"{kind}\"");
            let labels: Vec<String> = labels.iter().cloned().chain([kind]).collect();
            sample(&mut text, name, &labels, &count.to_string());
        }
        text
    }

    /// Name, kind, help and value of each metric but the divergences. Counters end in `_total`, and sizes in `_bytes`.
    fn metrics(&self) -> Vec<(&'static str, &'static str, &'static str, String)> {
        let counts = [
            ("terrace_steps_total", "Steps begun.", self.steps),
            ("terrace_steps_on_script_total", "Steps that ran exactly as planned.", self.steps_on_script),
            ("terrace_events_total", "Requests and frees inside steps that have ended.", self.events),
            ("terrace_allocs_total", "Requests inside steps that have ended.", self.allocs),
            ("terrace_slow_allocs_total", "Requests not answered from a script.", self.slow_allocs),
            ("terrace_replay_allocs_total", "Requests in steps of a known key.", self.replay_allocs),
            ("terrace_hits_total", "Of these, requests served in plan.", self.hits),
            ("terrace_replay_allocs_warm_total", "Requests in steps of a key seen twice.", self.replay_allocs_warm),
            ("terrace_hits_warm_total", "Of these, requests served in plan.", self.hits_warm),
            ("terrace_plans_total", "Plans made.", self.plans),
            ("terrace_redzones_damaged_total", "Buffers with a damaged redzone.", self.redzones_damaged),
        ];
        let sizes = [
            ("terrace_reservation_bytes", "The one reservation.", self.reservation),
            ("terrace_arena_bytes", "The largest plan so far.", self.arena),
            ("terrace_lower_bound_bytes", "The largest load of any step.", self.lower_bound),
            ("terrace_waste_bytes", "The largest plan less the largest load.", self.waste()),
            ("terrace_outside_bytes", "In use outside plans.", self.outside),
            ("terrace_outside_peak_bytes", "The most in use outside plans.", self.outside_peak),
            ("terrace_overflow_bytes", "Of what is outside, what a plan should have served.", self.overflow),
            ("terrace_overflow_peak_bytes", "The most that a plan should have served.", self.overflow_peak),
        ];
        let seconds = format!("{}.{:09}", self.plan_ns / 1_000_000_000, self.plan_ns % 1_000_000_000);
        let counters = counts.map(|(name, help, value)| (name, COUNTER, help, value.to_string()));
        let time = ("terrace_plan_seconds_total", COUNTER, "Time spent waiting for plans.", seconds);
        let gauges = sizes.map(|(name, help, value)| (name, GAUGE, help, value.to_string()));
        counters.into_iter().chain([time]).chain(gauges).collect()
    }
}

fn head(text: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

fn sample(text: &mut String, name: &str, labels: &[String], value: &str) {
    let _ = match labels {
        [] => writeln!(text, "{name} {value}"),
        labels => writeln!(text, "{name}{{{}}} {value}", labels.join(",")),
    };
}

/// `name="value"` for each label: names made valid, values escaped, a name that comes twice only once.
fn label_pairs(labels: &[(&str, &str)]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    let mut pairs = Vec::new();
    for (name, value) in labels {
        let valid = |c: char| if c.is_ascii_alphanumeric() || c == '_' { c } else { '_' };
        let mut name: String = name.chars().map(valid).collect();
        if name.is_empty() || name.starts_with(|c: char| c.is_ascii_digit()) {
            name.insert(0, '_');
        }
        if name == "kind" {
            name.insert_str(0, "exported_");
        }
        if !names.contains(&name) {
            let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            pairs.push(format!("{name}=\"{value}\""));
            names.push(name);
        }
    }
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats() -> Stats {
        let divergences = Counts { grew: 2, late_free: 1, ..Counts::default() };
        Stats {
            reservation: 1 << 20,
            steps: 7,
            events: 40,
            replay_allocs: 8,
            hits: 6,
            arena: 4096,
            lower_bound: 3072,
            plan_ns: 1_500_000_001,
            divergences,
            ..Stats::default()
        }
    }

    #[test]
    fn prometheus_reads_this() {
        let text = stats().to_prometheus(&[("device", "0")]);
        let head = "# HELP terrace_steps_total Steps begun.\n# TYPE terrace_steps_total counter\n\
                    terrace_steps_total{device=\"0\"} 7\n";
        assert!(text.starts_with(head), "{text}");
        for line in [
            "terrace_plan_seconds_total{device=\"0\"} 1.500000001",
            "# TYPE terrace_waste_bytes gauge",
            "terrace_waste_bytes{device=\"0\"} 1024",
            "terrace_divergences_total{device=\"0\",kind=\"grew\"} 2",
            "terrace_divergences_total{device=\"0\",kind=\"given_up\"} 0",
        ] {
            assert_eq!(text.lines().filter(|found| *found == line).count(), 1, "{line} in {text}");
        }
        assert!(text.ends_with("\n") && !text.contains("\n\n"));
        let kinds = text.lines().filter(|line| line.starts_with("terrace_divergences_total{"));
        assert_eq!(kinds.count(), Counts::default().each().len());
    }

    #[test]
    fn every_metric_has_its_lines_and_counters_end_in_total() {
        let text = stats().to_prometheus(&[]);
        let mut seen = std::collections::HashSet::new();
        let mut lines = text.lines().peekable();
        while let Some(help) = lines.next() {
            let name = help.strip_prefix("# HELP ").unwrap().split(' ').next().unwrap();
            let kind = lines.next().unwrap().strip_prefix(&format!("# TYPE {name} ")).unwrap();
            assert_eq!(kind == "counter", name.ends_with("_total"), "{name}");
            assert!(seen.insert(name.to_owned()), "{name} twice");
            let mut samples = 0;
            while let Some(line) = lines.next_if(|line| !line.starts_with('#')) {
                assert!(line.strip_prefix(name).unwrap().starts_with([' ', '{']), "{line}");
                line.rsplit(' ').next().unwrap().parse::<f64>().unwrap();
                samples += 1;
            }
            assert!(samples > 0, "{name}");
        }
        assert_eq!(seen.len(), 21);
    }

    #[test]
    fn labels_are_made_valid() {
        let labels = [("a-b", "x\\y\"z\n"), ("0", ""), ("kind", "k"), ("a_b", "again"), ("", "e"), ("\u{e9}", "é")];
        let expected = ["a_b=\"x\\\\y\\\"z\\n\"", "_0=\"\"", "exported_kind=\"k\"", "_=\"e\""];
        assert_eq!(label_pairs(&labels), expected);
    }

    #[test]
    fn json_has_the_fields_and_what_follows_from_them() {
        let value: serde_json::Value = serde_json::from_str(&stats().to_json()).unwrap();
        for (field, wanted) in [("reservation", 1 << 20), ("events", 40), ("waste", 1024), ("divergences_total", 3)] {
            assert_eq!(value[field], wanted, "{field}");
        }
        assert_eq!((&value["hit_rate"], &value["divergences"]["late_free"]), (&0.75.into(), &1.into()));
        assert_eq!((stats().events_per_second(2.0), stats().events_per_second(0.0)), (20.0, 0.0));
        assert_eq!(Stats::default().hit_rate(), 1.0);
    }
}
