//! A page with a memory map to zoom into: one file, which asks the network for nothing.
//!
//! The page is `map.html` with `map.css`, `map.js` and the plan put in its places. The figures are written here, so they can be
//! read without scripts; the rectangles go in as columns of small integers, in units of the largest power of two that
//! divides them all, births and buffer numbers as differences to the row before.

use std::io::{self, Write};

use serde::Serialize;
use terrace_profiles::units::Bytes;

use super::escape;
use super::json::in_script;
use super::picture::{Rect, aliases, arenas, colours, rects, ticks};
use super::summary::{Summary, by_label, lane_name};
use crate::plan::Plan;

const PAGE: &str = include_str!("map.html");
const STYLE: &str = include_str!("map.css");
const SCRIPT: &str = include_str!("map.js");

/// Writes the page; see the module's page.
pub(super) fn write(plan: &Plan, summary: &Summary, out: &mut dyn Write) -> io::Result<()> {
    // What is put in is never searched for places again: a label may well read {{script}}.
    let mut rest = PAGE;
    while let Some((before, after)) = rest.split_once("{{") {
        let (place, after) = after.split_once("}}").expect("map.html closes what it opens");
        out.write_all(before.as_bytes())?;
        match place {
            "title" => out.write_all(escape(&summary.name).as_bytes())?,
            "style" => out.write_all(STYLE.as_bytes())?,
            "figures" => figures(summary, out)?,
            "notes" => notes(summary, out)?,
            "data" => out.write_all(in_script(&Data::of(plan, summary))?.as_bytes())?,
            "script" => out.write_all(SCRIPT.as_bytes())?,
            other => unreachable!("map.html has a place named {other}"),
        }
        rest = after;
    }
    out.write_all(rest.as_bytes())
}

fn figures(summary: &Summary, out: &mut dyn Write) -> io::Result<()> {
    let (verdict, class) = match (summary.optimal, summary.gap_bytes) {
        (true, _) => ("proven optimal".to_owned(), "good"),
        (false, gap) => (format!("gap {gap} not proven"), "warn"),
    };
    let mut figure = |key: &str, value: &str, remark: &str, class: &str| {
        let (value, remark) = (escape(value), escape(remark));
        writeln!(out, "<div><dt>{key}</dt><dd>{value}</dd><dd class=\"remark {class}\">{remark}</dd></div>")
    };
    let exact = |bytes: u64| format!("{bytes} B");
    figure("arena", &summary.makespan.to_string(), &exact(summary.makespan.get()), "")?;
    let ratio = format!("ratio {:.4}", summary.ratio);
    figure("verdict", &ratio, &verdict, class)?;
    figure("lower bound", &summary.lower_bound.to_string(), &exact(summary.lower_bound.get()), "")?;
    figure("all buffers", &summary.total_bytes.to_string(), &exact(summary.total_bytes.get()), "")?;
    let align = format!("aligned to {}", summary.alignment);
    figure("buffers", &summary.buffers.to_string(), &align, "")?;
    figure("peak", &format!("tick {}", summary.peak_tick), &format!("{} alive", summary.peak.len()), "")?;
    figure("strategy", &summary.strategy, &format!("{} nodes", summary.nodes), "")?;
    if let Some(capacity) = summary.capacity {
        let room = match (summary.headroom, summary.short_bytes) {
            (Some(room), _) => format!("headroom {room}"),
            (None, short) => format!("does not fit: {} short", short.unwrap_or(Bytes::ZERO)),
        };
        figure("capacity", &capacity.to_string(), &room, if summary.fits { "good" } else { "warn" })?;
    }
    if summary.interrupted {
        figure("search", "cut short", "by the time limit: may differ between runs", "warn")?;
    }
    Ok(())
}

fn notes(summary: &Summary, out: &mut dyn Write) -> io::Result<()> {
    let own = [("plan", summary.fingerprint.as_str()), ("profile", summary.profile_fingerprint.as_str())];
    let given = summary.notes.iter().map(|(key, text)| (key.as_str(), text.as_str()));
    for (key, text) in given.chain(own) {
        writeln!(out, "<div><dt>{}</dt><dd>{}</dd></div>", escape(key), escape(text))?;
    }
    Ok(())
}

/// What `map.js` reads.
#[derive(Serialize)]
struct Data<'a> {
    /// Bytes of one unit of [`Columns::from`] and [`Columns::bytes`].
    unit: u64,
    first: u64,
    last: u64,
    peak: u64,
    makespan: u64,
    lower_bound: u64,
    labels: Vec<Label<'a>>,
    /// Texts of [`Columns::lane`].
    lanes: &'a [String],
    /// Parts of the arena that belong to different lanes.
    arenas: Vec<Part>,
    rects: Columns,
    aliases: Columns,
}

#[derive(Serialize)]
struct Label<'a> {
    text: &'a str,
    colour: &'static str,
    buffers: u64,
    total: u64,
    peak_buffers: u64,
    peak: u64,
}

#[derive(Serialize)]
struct Part {
    lane: String,
    from: u64,
    to: u64,
}

/// Rectangles, a column for each property.
#[derive(Default, Serialize)]
struct Columns {
    birth: Vec<i128>,
    life: Vec<u64>,
    from: Vec<u64>,
    bytes: Vec<u64>,
    /// Bytes of rounding: what was not asked for.
    slack: Vec<u64>,
    slot: Vec<i64>,
    label: Vec<u32>,
    lane: Vec<u32>,
}

impl<'a> Data<'a> {
    fn of(plan: &'a Plan, summary: &Summary) -> Self {
        let (rects, aliases) = (rects(plan), aliases(plan));
        let divisible = rects.iter().chain(&aliases).fold(0, |bits, rect| bits | rect.from | rect.to);
        let unit = 1_u64 << divisible.trailing_zeros().min(40);
        let colours = colours(plan);
        let labels = plan.labels().iter().zip(by_label(plan)).zip(colours).map(|((text, figures), colour)| Label {
            text,
            colour,
            buffers: figures.buffers,
            total: figures.total,
            peak_buffers: figures.peak_buffers,
            peak: figures.peak,
        });
        let arenas = arenas(plan);
        Self {
            unit,
            first: ticks(plan).0,
            last: ticks(plan).1,
            peak: summary.peak_tick.0,
            makespan: summary.makespan.get(),
            lower_bound: summary.lower_bound.get(),
            labels: labels.collect(),
            lanes: plan.lanes(),
            arenas: arenas
                .iter()
                .map(|arena| Part { lane: lane_name(plan, arena.lane), from: arena.from, to: arena.to })
                .collect(),
            rects: Columns::of(plan, &rects, unit),
            aliases: Columns::of(plan, &aliases, unit),
        }
    }
}

impl Columns {
    fn of(plan: &Plan, rects: &[Rect], unit: u64) -> Self {
        let mut columns = Self::default();
        let (mut birth, mut number) = (0, 0);
        for rect in rects {
            let slot = &plan.slots()[rect.slot as usize];
            columns.birth.push(i128::from(rect.birth) - birth);
            columns.life.push(rect.death - rect.birth);
            columns.from.push(rect.from / unit);
            columns.bytes.push((rect.to - rect.from) / unit);
            columns.slack.push(rect.to - rect.from - rect.asked);
            columns.slot.push(i64::from(rect.slot) - number);
            columns.label.push(slot.label);
            columns.lane.push(slot.lane);
            (birth, number) = (i128::from(rect.birth), i64::from(rect.slot));
        }
        columns
    }
}

#[cfg(test)]
mod tests {
    use super::super::ReportFormat;
    use super::super::tests::{SMALL, body, odd_plan, plan, refusal, show, show_verdict};
    use super::*;

    fn html(plan: &Plan) -> String {
        show(plan, ReportFormat::Html)
    }

    fn data(html: &str) -> &str {
        let start = "<script type=\"application/json\" id=\"data\">";
        html.split_once(start).unwrap().1.split_once("</script>").unwrap().0
    }

    #[test]
    fn the_rectangles_are_in_the_page() {
        let html = html(&plan(SMALL));
        let rects = "\"rects\":{\"birth\":[0,4,2],\"life\":[6,8,4],\"from\":[0,1,0],\"bytes\":[1,2,1],\"slack\":[24,0,124],\
                     \"slot\":[0,1,1],\"label\":[0,1,2],\"lane\":[0,0,0]}";
        assert!(data(&html).contains(rects), "{}", data(&html));
        assert!(data(&html).starts_with("{\"unit\":1024,\"first\":0,\"last\":12,\"peak\":4,\"makespan\":3072,"));
        assert!(html.contains("<dd class=\"remark good\">proven optimal</dd>"));
    }

    #[test]
    fn aliases_and_lanes_are_in_the_page() {
        let html = html(&odd_plan());
        assert!(data(&html).contains("\"aliases\":{\"birth\":[5],\"life\":[7],\"from\":[2],\"bytes\":[1]"));
        assert!(data(&html).contains("\"arenas\":[{\"lane\":\"main\",\"from\":0,\"to\":3072},{\"lane\":\"copy\","));
    }

    #[test]
    fn markup_in_texts_is_inert_and_places_are_filled_once() {
        let plain = html(&plan(&[(512, "x", 0, 1, 0)]));
        let evil = "</script><img src=x onerror=alert(1)><!--{{script}}";
        let mut body = body(&[(512, evil, 0, 1, 0)]);
        body.name = evil.to_owned();
        body.notes = vec![(evil.to_owned(), evil.to_owned())];
        body.lanes = vec![evil.to_owned()];
        let html = html(&Plan::new(body).unwrap());
        assert!(!html.contains("<img"));
        for tag in ["</script", "<script", "<!--"] {
            assert_eq!(html.matches(tag).count(), plain.matches(tag).count(), "{tag}");
        }
        assert!(data(&html).contains("\\u003c/script\\u003e\\u003cimg src=x onerror=alert(1)\\u003e"));
    }

    #[test]
    fn the_page_asks_the_network_for_nothing() {
        let html = html(&plan(SMALL));
        assert!(html.contains("default-src 'none'"));
        for word in ["http:", "https:", "@import", "url(", " src=", "fetch(", "XMLHttpRequest"] {
            assert!(!html.contains(word), "{word}");
        }
    }

    #[test]
    fn a_refusal_is_told() {
        let html = show_verdict(&refusal(2048, true), ReportFormat::Html);
        assert!(html.contains("<dd>2.0 KiB</dd><dd class=\"remark warn\">does not fit: 1.0 KiB short</dd>"));
    }

    #[test]
    fn an_interruption_and_a_gap_are_told() {
        let mut body = body(SMALL);
        body.placement.offsets[2] = terrace_profiles::units::Offset::new(3072).unwrap();
        body.proof.optimal = false;
        body.proof.interrupted = true;
        let html = html(&Plan::new(body).unwrap());
        assert!(html.contains("gap 1.0 KiB not proven") && html.contains("by the time limit"));
    }
}
