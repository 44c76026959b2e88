//! The JSON of events and steps.

use terrace_profiles::{Action, BufferId, LabelId};

use super::{fails, load, note, one, peak};

#[test]
fn recorded_traces_read_as_their_readme_says() {
    for (path, buffers, bytes, steps) in [
        ("qwen27b_L4_chunked_T12384_C4128_dec4.events.json.gz", 2_050, 949_531_136, 0),
        ("moe8_mixed.steps.json.gz", 7_256, 1_423_818_176, 8),
    ] {
        let profile = load(&format!("traces/{path}"));
        let lives = profile.lives().unwrap();
        assert_eq!((lives.len(), peak(&lives), profile.steps().len()), (buffers, bytes, steps), "{path}");
    }
}

#[test]
fn keys_come_in_any_order_and_unknown_ones_are_skipped() {
    let first = one(br#"{"info":{"gpu":"H","n":3},"labels":["x","y"],"events":[["a",0,8,1],["f",0,8,1]]}"#);
    for other in [
        r#"{"events":[["a",0,8,1],["f",0]],"labels":["x","y"],"info":{"gpu":"H","n":3}}"#,
        r#"{"v":[{"a":[1]}],"events":[["a",0,8,1,{"z":1}],["f",0,"?"]],"info":{"gpu":"H","n":3,"l":[1]},"labels":["x","y"]}"#,
    ] {
        assert_eq!(one(other.as_bytes()), first, "{other}");
    }
    assert_eq!(note(&first, "gpu"), Some("H"));
    assert_eq!(note(&first, "n"), Some("3"));
}

#[test]
fn ids_may_be_any_integers() {
    let profile =
        one(br#"{"labels":["x"],"events":[["a",18446744073709551615,8,0],["a",-7,9,0],["f",18446744073709551615]]}"#);
    assert!(matches!(profile.events[1].action, Action::Alloc { id: BufferId(1), .. }));
    assert!(matches!(profile.events[2].action, Action::Free { id: BufferId(0) }));
}

#[test]
fn a_label_that_is_not_given_is_unknown() {
    let profile = one(br#"{"labels":["x"],"events":[["a",0,8],["a",1,8,-1],["a",2,8,null],["a",3,8,0]]}"#);
    assert_eq!(profile.labels, ["x", "unknown"]);
    let labels: Vec<LabelId> = profile.lives().unwrap().iter().map(|life| life.label).collect();
    assert_eq!(labels, [LabelId(1), LabelId(1), LabelId(1), LabelId(0)]);
    assert_eq!(one(br#"{"events":[["a",0,8]]}"#).labels, ["unknown"]);
}

#[test]
fn a_bad_event_is_named_by_number() {
    for (event, message) in [
        (r#"["a"]"#, "the event ends before its id"),
        (r#"["a",1]"#, "the event ends before its number of bytes"),
        (r#"["a",1.5,8,0]"#, "the id is 1.5, not a whole number below 2^64"),
        (r#"["a","1",8,0]"#, "the id is something else, not a whole number below 2^64"),
        (r#"["a",1,-8,0]"#, "-8 is not a size between 0 and 2^63 - 1"),
        (r#"["a",1,9223372036854775808,0]"#, "9223372036854775808 is not a size between 0 and 2^63 - 1"),
        (r#"["a",1,8,5]"#, "label 5 is not among the 1 labels of the file"),
        (r#"["a",1,8,-2]"#, "label -2 is not an index; -1 stands for none"),
        (r#"["a",1,8,1e3]"#, "label 1000 is not an index; -1 stands for none"),
        (r#"["a",0,8,0]"#, "id 0 is allocated twice"),
        (r#"["f",7]"#, "id 7 is freed but not allocated"),
        (r#"["f"]"#, "the event ends before its id"),
        (r#"["s"]"#, "a step begins without a key, such as \"prefill/128\""),
        (r#"["x",1]"#, "'x' begins no event; \"a\", \"f\", \"s\" and \"e\" do"),
        ("[]", "the event is an empty list"),
    ] {
        let json = format!(r#"{{"labels":["x"],"events":[["a",0,8,0],{event}]}}"#);
        fails(json.as_bytes(), &format!("event 1: {message}"));
    }
    fails(br#"{"events":[["a",0,8],["f",0],["f",0]]}"#, "event 2: id 0 is freed but was already freed at event 1");
}

#[test]
fn what_the_events_contradict_is_named_by_event() {
    let message = |json: &str| super::parse(json.as_bytes()).unwrap_err();
    assert_eq!(message(r#"{"events":[["e"]]}"#), "profile 'x': event 0: a step ends where none is open");
    assert_eq!(
        message(r#"{"events":[["s","a\nb"],["s","c"]]}"#),
        "profile 'x': event 1: a step begins while step 'a\\nb' is open"
    );
}

#[test]
fn json_that_is_not_a_record_is_named_by_place() {
    fails(b"{}", "the JSON has no \"events\"; a record has \"info\", \"labels\" and \"events\"");
    fails(
        br#"{"segments":[],"device_traces":[[]]}"#,
        "this is a snapshot of torch as JSON; store it with pickle.dump instead",
    );
    fails(
        br#"{"labels":["x"],"events":[["a",0,8,0],["f""#,
        "event 1: the JSON ends early, at line 1, column 42; the file is truncated",
    );
    fails(br#"{"events":[["e"] "#, "event 1: the JSON ends early, at line 1, column 17; the file is truncated");
    fails(b"{\"events\":[\n[\"e\"}", "event 0: expected `,` or `]`, at line 2, column 5 of the JSON");
    fails(br#"{"events":[]} x"#, "trailing characters, at line 1, column 15 of the JSON");
    fails(br#"{"events":[],"events":[]}"#, "'events' stands twice in the JSON");
    fails(
        br#"{"events":{}}"#,
        "invalid type: map, expected a list of events for \"events\", at line 1, column 11 of the JSON",
    );
    fails(br#"{"labels":[1]}"#, "invalid type: integer `1`, expected a string, at line 1, column 13 of the JSON");
}
