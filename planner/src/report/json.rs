//! One JSON object on one line. The only file of the planner that names serde_json.
//!
//! The fields are those of [`Summary`](super::summary::Summary), in that order. Bytes, offsets and ticks are integers throughout;
//! readers that keep numbers as doubles are exact up to 2^53.

use std::io::{self, Write};

use serde::Serialize;

/// Writes `value` and a line feed.
pub(super) fn write_line<T: Serialize>(value: &T, out: &mut dyn Write) -> io::Result<()> {
    serde_json::to_writer(&mut *out, value)?;
    out.write_all(b"\n")
}

/// `value` as JSON that may stand inside a script element: whatever a label says, no tag can begin in it.
pub(super) fn in_script<T: Serialize>(value: &T) -> io::Result<String> {
    let text = serde_json::to_string(value)?;
    // These can only stand inside strings, where JSON lets any character be written as a number.
    Ok(text
        .replace('<', "\\u003c")
        .replace('>', "\\u003e")
        .replace('&', "\\u0026")
        .replace('\u{2028}', "\\u2028")
        .replace('\u{2029}', "\\u2029"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use terrace_profiles::units::Bytes;

    use super::super::ReportFormat;
    use super::super::tests::{SMALL, body, odd_plan, plan, refusal, show, show_verdict};
    use super::*;
    use crate::plan::Plan;

    fn parsed(plan: &Plan) -> Value {
        let text = show(plan, ReportFormat::Json);
        assert_eq!(text.matches('\n').count(), 1, "one line");
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn the_fields_have_their_values() {
        let mut body = body(SMALL);
        body.options.capacity = Bytes::new(4000);
        let value = parsed(&Plan::new(body).unwrap());
        let expected = json!({
            "name": "small", "buffers": 3, "alignment": 512, "total_bytes": 4096, "lower_bound": 3072, "makespan": 3072,
            "ratio": 1.0, "gap_bytes": 0, "optimal": true, "interrupted": false, "strategy": "by hand", "nodes": 7,
            "capacity": 4000, "headroom": 928, "short_bytes": null,
            "fits": true, "proven_not_to_fit": false, "culprits": [], "culprits_minimal": false,
            "peak_tick": 4, "peak_bytes": 3072,
            "peak": [
                {"label": "net.py:2:b", "bytes": 2048, "offset": 1024, "birth": 4, "death": 12, "lane": 0},
                {"label": "net.py:1:a", "bytes": 1024, "offset": 0, "birth": 0, "death": 6, "lane": 0},
            ],
            "lanes": [{"name": "main", "lane": 0, "storages": 3, "load": 3072, "tick": 4, "bytes": 3072}],
            "notes": [["gpu", "none"]], "spaces": [], "bound_by_buffer": null,
        });
        for (field, wanted) in expected.as_object().unwrap() {
            assert_eq!(&value[field], wanted, "{field}");
        }
        assert!(value["fingerprint"].is_string() && value["profile_fingerprint"].is_string());
        assert_eq!(value.as_object().unwrap().len(), expected.as_object().unwrap().len() + 2, "nothing else");
    }

    #[test]
    fn without_a_capacity_it_is_null_and_an_alias_is_counted() {
        let value = parsed(&odd_plan());
        assert!(value["capacity"].is_null() && value["headroom"].is_null());
        assert_eq!(value["peak"][0].get("aliases"), None, "the view is born a tick after the peak");
        let value = parsed(&plan(&[]));
        assert_eq!((&value["ratio"], &value["peak"]), (&json!(1.0), &json!([])));
    }

    #[test]
    fn a_refusal_does_not_fit() {
        let value: Value = serde_json::from_str(&show_verdict(&refusal(2048, false), ReportFormat::Json)).unwrap();
        assert_eq!((&value["fits"], &value["proven_not_to_fit"]), (&json!(false), &json!(false)));
        assert_eq!(
            (&value["capacity"], &value["short_bytes"], &value["headroom"]),
            (&json!(2048), &json!(1024), &Value::Null)
        );
    }

    #[test]
    fn no_tag_begins_inside_a_script() {
        let text = in_script(&"</script><img onerror=x>&\u{2028}").unwrap();
        assert!(!text.contains(['<', '>', '&', '\u{2028}']));
        assert_eq!(serde_json::from_str::<String>(&text).unwrap(), "</script><img onerror=x>&\u{2028}");
    }
}
