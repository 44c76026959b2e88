//! Both CSV formats: minimalloc's problems and RMM's logs.

use terrace_profiles::units::{Bytes, Offset, Tick};
use terrace_profiles::{Action, BufferId};

use super::{fails, note, one};

/// Events in one line: what, which buffer, when.
fn events(input: &str) -> String {
    let profile = one(input.as_bytes());
    let mut line = String::new();
    for event in &profile.events {
        let text = match &event.action {
            Action::Alloc { id, bytes, .. } => format!("a{id}:{}", bytes.get()),
            Action::Free { id } => format!("f{id}"),
            Action::Keep { id, from, to } => format!("k{id}:{}-{}", from.get(), to.get()),
            other => format!("{other:?}"),
        };
        line += &format!("{text}@{} ", event.tick);
    }
    line.trim_end().to_owned()
}

#[test]
fn at_one_tick_ends_come_before_changes_and_those_before_beginnings() {
    assert_eq!(
        events("id,lower,upper,size,gaps\nx,5,9,30,\ny,0,5,10,\nz,0,9,20,5-6@0:4\n"),
        "a0:10@0 a1:20@0 f0@5 k1:0-4@5 a2:30@5 k1:0-20@6 f1@9 f2@9"
    );
}

#[test]
fn buffers_are_numbered_by_beginning_then_row_and_labelled_by_id() {
    let profile = one(b"id,lower,upper,size\nlast,7,8,1\nfirst,0,8,1\nsecond,0,8,1\n");
    assert_eq!(profile.labels, ["first", "second", "last"]);
    assert_eq!(profile.lives().unwrap()[2].label.0, 2);
}

#[test]
fn columns_have_several_names_and_any_order() {
    let expect = events("id,lower,upper,size\nb,1,4,8\n");
    for header in ["SIZE,begin,upper,buffer", "size , start , upper , buffer_id"] {
        assert_eq!(events(&format!("{header}\n8,1,4,b\n")), expect);
    }
    assert_eq!(events("id,color,lower,upper,size\nb,red,1,4,8\n"), expect);
}

#[test]
fn a_column_called_end_holds_the_last_tick() {
    let plain = "id,lower,upper,size,gaps\nb,1,9,8,3-5\n";
    assert_eq!(events("id,lower,end,size,gaps\nb,1,8,8,3-4\n"), events(plain));
}

#[test]
fn line_ends_blank_lines_and_quotes_do_not_matter() {
    let plain = "id,lower,upper,size\nb,1,9,8\nc,2,3,4\n";
    for input in [
        plain.replace('\n', "\r\n"),
        plain.replace('\n', "\n\n"),
        plain.trim_end().to_owned(),
        plain.replace('b', "\"b\""),
        plain.replace(',', " ,\t"),
    ] {
        assert_eq!(one(input.as_bytes()), one(plain.as_bytes()), "{input:?}");
    }
}

#[test]
fn negative_times_shift_all_and_others_stay() {
    assert_eq!(events("id,lower,upper,size,gaps\nb,-5,3,8,-4--2\n"), "a0:8@0 k0:0-0@1 k0:0-8@3 f0@8");
    assert_eq!(events("id,lower,upper,size\nb,10,12,8\n"), "a0:8@10 f0@12");
}

#[test]
fn gaps_become_ranges_kept() {
    let gaps = |list: &str| events(&format!("id,lower,upper,size,gaps\nb,0,9,8,{list}\n"));
    assert_eq!(gaps(""), "a0:8@0 f0@9");
    assert_eq!(gaps("2-4 5-6@1:3"), "a0:8@0 k0:0-0@2 k0:0-8@4 k0:1-3@5 k0:0-8@6 f0@9");
    assert_eq!(gaps("2-4@0:2 4-6@4:8"), "a0:8@0 k0:0-2@2 k0:4-8@4 k0:0-8@6 f0@9");
    assert_eq!(gaps("0-2 7-9"), "a0:8@0 k0:0-0@0 k0:0-8@2 k0:0-0@7 f0@9");
}

#[test]
fn alignments_and_offsets_become_hints() {
    let profile = one(b"id,lower,upper,size,alignment,hint,offset\na,0,1,8,1,4,-1\nb,0,1,8,64,-1,0\nc,0,1,8,,,\n");
    let lives = profile.lives().unwrap();
    assert_eq!(lives[0].hints, None);
    assert_eq!(lives[2].hints, None);
    let hints = lives[1].hints.as_deref().unwrap();
    assert_eq!(hints.align.unwrap().get(), 64);
    assert_eq!(hints.fixed, Some(Offset::ZERO));
}

#[test]
fn the_extremes_of_time_and_size_fit_or_are_refused() {
    let max = i64::MAX;
    assert_eq!(events(&format!("id,lower,upper,size\nb,0,{max},{max}\n")), format!("a0:{max}@0 f0@{max}"));
    fails(
        format!("id,lower,upper,size\nb,{},{max},1\n", i64::MIN).as_bytes(),
        "line 2: the times span more than 2^63 ticks",
    );
    fails(format!("id,lower,end,size\nb,0,{max},1\n").as_bytes(), "line 2: the end 9223372036854775807 is too late");
}

#[test]
fn a_bad_row_of_a_problem_is_named_by_line() {
    let all = "id,lower,upper,size,alignment,offset,gaps";
    for (row, message) in [
        ("b,1,1,8,1,-1,", "buffer 'b' ends at 1, not after it begins at 1"),
        ("b,5,-3,8,1,-1,", "buffer 'b' ends at -3, not after it begins at 5"),
        ("b,0,1,-8,1,-1,", "the size -8 of buffer 'b' is negative"),
        (
            "b,0,1,9223372036854775808,1,-1,",
            "the size '9223372036854775808' is not a whole number between -2^63 and 2^63 - 1",
        ),
        ("b,0,1,8.5,1,-1,", "the size '8.5' is not a whole number between -2^63 and 2^63 - 1"),
        ("b,0,,8,1,-1,", "the upper is missing"),
        ("b,zero,1,8,1,-1,", "the lower 'zero' is not a whole number between -2^63 and 2^63 - 1"),
        ("b,0,1,8,48,-1,", "alignment 48 is not a power of two between 1 and 2^40"),
        ("b,0,1,8,0,-1,", "alignment 0 is not a power of two between 1 and 2^40"),
        ("b,0,1,8,-2,-1,", "alignment -2 is not a power of two between 1 and 2^40"),
        ("b,0,1,8,1,9223372036854775800,", "buffer 'b' at its offset ends beyond 2^63 - 1 bytes"),
        ("b,0,9,8,1,-1,3", "gap '3' is not of the form a-b or a-b@lo:hi"),
        ("b,0,9,8,1,-1,3-x", "gap '3-x' is not of the form a-b or a-b@lo:hi"),
        ("b,0,9,8,1,-1,3-4@5", "gap '3-4@5' is not of the form a-b or a-b@lo:hi"),
        ("b,0,9,8,1,-1,3-4@5:9", "gap '3-4@5:9' keeps bytes outside the 8 of its buffer"),
        ("b,0,9,8,1,-1,4-4", "gap '4-4' ends before it begins"),
        ("b,0,9,8,1,-1,4-10", "gap '4-10' reaches outside the life of its buffer"),
        ("b,0,9,8,1,-1,4-6 5-7", "gap '5-7' begins before the gap before it ends"),
        ("b,0,1,8,1,-1", "the row has 6 fields where the header has 7"),
        ("a,0,1,8,1,-1,", "id 'a' was already used on line 2"),
    ] {
        fails(format!("{all}\na,0,1,8,1,-1,\n{row}\n").as_bytes(), &format!("line 3: {message}"));
    }
    fails(b"id,lower,size\n", "line 1: the header has no column 'upper' or 'end'");
    fails(b"lower,upper,size\n", "line 1: the header has no column 'id' or 'buffer' or 'buffer_id'");
    fails(b"id,lower,upper,size,size\n", "line 1: the header names the column 'size' twice");
    fails(b"id,lower,upper,size\n\xff,0,1,8\n", "line 2: the id is not UTF-8");
}

const LOG: &str = "Thread,Time,Action,Pointer,Size,Stream\n";

fn log(rows: &[&str]) -> String {
    let mut text = LOG.to_owned();
    for row in rows {
        text += &format!("12,14:21:19.998533,{row}\n");
    }
    text
}

#[test]
fn a_log_becomes_lives_in_its_order() {
    let text = log(&[
        "allocate,0x30a000000,256,0x2",
        "allocate failure,(nil),1099511627776,0x2",
        "allocate,0x30A000100,512,0x7f",
        "free,0x30a000000,256,0x2",
        "allocate,0x30a000000,64,0x2",
        "allocate,(nil),0,0x2",
        "free,(nil),0,0x2",
        "deallocate,30a000100,512,0x2",
    ]);
    assert_eq!(events(&text), "a0:256@0 a1:512@1 f0@2 a2:64@3 f1@4");
    let profile = one(text.as_bytes());
    assert_eq!(profile.lanes, ["stream 0x2", "stream 0x7f"]);
    assert_eq!(profile.labels, ["thread 12"]);
    assert_eq!(note(&profile, "failed allocations"), Some("1"));
    let last = &profile.lives().unwrap()[2];
    assert_eq!((last.bytes, last.freed, last.death), (Bytes::new(64).unwrap(), false, Tick(5)));
    assert!(matches!(profile.events[2].action, Action::Free { id: BufferId(0) }));
}

#[test]
fn a_log_may_lack_what_is_not_needed() {
    let profile = one(b"Action,Pointer,Size\nallocate,0x10,8\n");
    assert_eq!((profile.labels, profile.lanes), (vec!["unknown".to_owned()], vec!["stream 0".to_owned()]));
}

#[test]
fn a_bad_row_of_a_log_is_named_by_line() {
    let first = "allocate,0x10,8,0x0";
    for (row, message) in [
        ("free,0x20,8,0x0", "address 0x20 is freed but not allocated"),
        ("allocate,0x10,8,0x0", "address 0x10 is allocated while it is still live (since line 2)"),
        ("free,0x10,9,0x0", "address 0x10 is freed with 9 bytes but was allocated with 8 at line 2"),
        ("allocate,0x20,-1,0x0", "the size -1 is negative"),
        ("allocate,0x20,,0x0", "the size is missing"),
        (
            "allocate,0x20,9223372036854775808,0x0",
            "the size '9223372036854775808' is not a whole number between -2^63 and 2^63 - 1",
        ),
        ("allocate,0x2z,8,0x0", "the pointer '0x2z' is not a hexadecimal address"),
        ("allocate,+20,8,0x0", "the pointer '+20' is not a hexadecimal address"),
        ("allocate,0x10000000000000000,8,0x0", "the pointer '0x10000000000000000' is not a hexadecimal address"),
        ("realloc,0x20,8,0x0", "'realloc' is not an action; allocate, free and allocate failure are"),
        ("allocate,0x20", "the row has 4 fields where the header has 6"),
    ] {
        fails(log(&[first, row]).as_bytes(), &format!("line 3: {message}"));
    }
}
