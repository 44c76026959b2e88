//! `plan model`, `plan fit` and `plan check`: what an operator sees, and what a build's gate relies on.

use super::*;

/// The card, weights and settings of the field report: genesis-vllm-patches issue 22.
const FIELD: [&str; 13] = [
    "fit",
    "qwen3.6-27b",
    "--gpu",
    "rtx3090",
    "--kv",
    "turboquant_3bit_nc",
    "--weights",
    "autoround-int4",
    "--mtp",
    "3",
    "--prefill-chunk",
    "4128",
    "--util",
];

fn field(rest: &[&str]) -> Ran {
    let args: Vec<&str> = FIELD.iter().chain(rest).copied().collect();
    plan(&args)
}

#[test]
fn the_field_reports_card_fits_92k_tokens() {
    let ran = field(&["0.93", "--max-model-len", "92000"]);
    assert_eq!(ran.status, DONE);
    insta::assert_snapshot!(ran.seen(Path::new("/nowhere")));
}

#[test]
fn the_field_reports_test_a_asked_for_a_buffer_of_the_feed_forward() {
    // Its pool had 79 blocks, and the prompt that killed it some 60,000 tokens; 414 MiB were held as fragments.
    let ran = field(&["0.93", "--max-model-len", "60000", "--blocks", "79", "--failed", "276.00MiB"]);
    assert_eq!(ran.status, DONE, "the pool holds the request");
    assert!(ran.text().contains("B  this size     mlp.gate_up\n"));
    insta::assert_snapshot!(ran.seen(Path::new("/nowhere")));
    // The other requests on record, and one that no buffer makes.
    let who = |failed: &str| {
        let text = field(&["0.93", "--max-model-len", "60000", "--failed", failed]).text();
        let rows: Vec<&str> = text.lines().skip_while(|line| !line.starts_with("who asked")).skip(1).collect();
        rows.iter().map(|row| format!("{}\n", &row[30..])).collect::<String>()
    };
    assert_eq!(who("138MiB"), "next larger   mlp.gate_up\nthis size     mlp.silu\nnext smaller  gdn.qkvz\n");
    assert!(who("50MiB").contains("this size     gdn.v_new\n"), "{}", who("50MiB"));
    assert_eq!(who("1GiB"), "nothing       no buffer of this step\nnext smaller  mlp.gate_up\n");
}

#[test]
fn the_field_reports_test_b_could_not_boot() {
    let ran = field(&["0.85", "--max-model-len", "65536"]);
    assert_eq!(ran.status, FINDING);
    assert!(ran.text().contains("one request needs 1.6046 GiB of the pool"));
    insta::assert_snapshot!(ran.seen(Path::new("/nowhere")));
    let ran = field(&["0.85", "--max-model-len", "65536", "--available", "0.29GiB"]);
    assert_eq!(ran.status, FINDING);
    assert!(ran.text().contains("the pool does not hold it: one request needs 1.6046 GiB"), "{}", ran.text());
}

#[test]
fn a_chunk_below_the_block_is_refused_and_a_prompt_in_one_piece_needs_more_than_one_change() {
    let args: Vec<&str> = FIELD.iter().map(|arg| if *arg == "4128" { "2048" } else { arg }).collect();
    let chunk = plan(&[&args[..], &["0.93", "--max-model-len", "60000"]].concat());
    let whole = plan(&["fit", "qwen3.6-27b", "--gpu", "24GiB", "--kv", "fp8"]);
    assert_eq!((chunk.status, whole.status), (FINDING, FINDING));
    insta::assert_snapshot!(format!("{}\n{}", chunk.seen(Path::new("/nowhere")), whole.seen(Path::new("/nowhere"))));
}

#[test]
fn two_cards_have_a_ledger_for_each_and_windows_are_terraces() {
    let args = ["fit", "qwen3.6-35b-a3b", "--gpu", "rtx3090", "--kv", "fp8", "--tp", "2", "--max-num-seqs", "4"];
    let ran = plan(&[&args[..], &["--window", "640", "--max-model-len", "262144"]].concat());
    assert_eq!(ran.status, DONE, "{}", ran.text());
    insta::assert_snapshot!(ran.seen(Path::new("/nowhere")));
}

#[test]
fn json_of_a_fit_has_every_number() {
    let args = ["0.93", "--max-model-len", "180000", "--blocks", "79", "--format", "json"];
    let ran = field(&args);
    let line = &ran.json()[0];
    assert_eq!(
        (&line["block_size"], &line["blocks_per_request"], &line["blocks"]),
        (&4128.into(), &59.into(), &79.into())
    );
    let tokens = &line["tokens_by_formula"];
    assert_eq!((&tokens["old"], &tokens["mid"], &tokens["new"]), (&326_112.into(), &78_432.into(), &241_016.into()));
    assert_eq!((&line["fits"], &line["boots"]), (&true.into(), &true.into()));
    assert_eq!(line["need_bytes"], 59 * 55_579_392_u64);
    assert_eq!(line["available_bytes"], 79 * 55_579_392_u64);
    assert_eq!(line["arena_bytes"].as_u64(), line["ledger"][3]["bytes"].as_u64());
    assert_eq!(line["ledger"][3]["name"], "activation arena");
    assert_eq!(line["ledger"][3]["kind"], "planned");
    assert!(line["concurrency"].as_f64().unwrap() > 1.3);
    let asked = line["requests"].as_array().unwrap().iter().find(|request| request["label"] == "mlp.gate_up").unwrap();
    assert_eq!((&asked["bytes"], &asked["asked_bytes"]), (&287_440_896.into(), &(276 << 20).into()));
    assert_eq!(ran.text(), field(&args).text(), "asked twice, the same bytes");

    // What the log prints as 2.17 GiB.
    let ran = field(&["0.93", "--max-model-len", "180000", "--available", "2.17GiB", "--format", "json"]);
    let line = &ran.json()[0];
    assert_eq!(
        (&line["blocks"], &line["max_model_len_estimate"], &line["fits"]),
        (&42.into(), &111_456.into(), &false.into())
    );

    let line = &field(&["0.85", "--max-model-len", "92000", "--format", "json"]).json()[0];
    let first = &line["changes"][0];
    assert_eq!((&first["what"], &first["fits"]), (&"--util 0.91".into(), &true.into()));
}

#[test]
fn a_sweep_is_a_table_a_drawing_and_a_picture() {
    let folder = tempfile::tempdir().unwrap();
    let svg = string(&folder.path().join("sweep.svg"));
    let args = [
        "fit",
        "qwen3.6-27b",
        "--gpu",
        "rtx3090",
        "--util",
        "0.93",
        "--mtp",
        "3",
        "--max-model-len",
        "92000",
        "--sweep",
    ];
    let ran = plan(&[&args[..], &["-o", &svg]].concat());
    assert_eq!(ran.status, DONE, "{}", ran.err);
    insta::assert_snapshot!(ran.seen(folder.path()));
    let picture = fs::read_to_string(&svg).unwrap();
    assert!(picture.starts_with("<svg ") && picture.contains("turboquant_3bit_nc, chunk 4128: "), "{picture}");
    let json = plan(&[&args[..], &["--format", "json", "--kv", "tq3"]].concat());
    let line = &json.json()[0];
    let row = &line["sweep"][0];
    assert_eq!((&row["kv"], &row["block_size"]), (&"turboquant_3bit_nc".into(), &4128.into()));
    assert_eq!((&row["chunks"][0]["prefill_chunk"], &row["chunks"][0]["fits"]), (&4128.into(), &true.into()));
    assert_eq!((&row["chunks"][1]["allowed"], &row["chunks"][1]["largest_context"]), (&false.into(), &0.into()));
}

#[test]
fn a_model_is_a_profile_that_solves() {
    let folder = tempfile::tempdir().unwrap();
    let file = string(&folder.path().join("a.profile"));
    let makespan = |args: &[&str]| {
        let ran = plan(&[&["model", "qwen3.6-27b", "-o", &file], args].concat());
        assert_eq!((ran.status, ran.err.as_str()), (DONE, ""));
        let solved = plan(&["solve", "--format", "json", &file]);
        solved.json()[0]["makespan"].as_u64().unwrap()
    };
    let mib = |bytes: u64| format!("{:.1}", bytes as f64 / f64::from(1 << 20));
    let mixer = ["--tokens", "4128", "--part", "mixer"];
    assert_eq!(mib(makespan(&mixer)), "776.1");
    assert_eq!(mib(makespan(&[&mixer[..], &["--lifetimes", "last-use"]].concat())), "499.3");
    assert_eq!(mib(makespan(&["--tokens", "4128", "--part", "mlp"])), "491.8");
    let op = makespan(&["--tokens", "60000", "--part", "gdn-op", "--engine", "fla"]);
    assert!((mib(op).parse::<f64>().unwrap() / 4360.3 - 1.0).abs() < 0.01, "{op}");
    // The residual stream plus a constant.
    let windowed = |tokens: &str| makespan(&["--tokens", tokens, "--part", "layer", "--window", "640"]);
    assert_eq!(windowed("60000") - 60_000 * 10_240, windowed("4128") - 4128 * 10_240);
    let two = makespan(&["--tokens", "1000", "--layers", "4", "--tp", "2", "--context", "5000", "--sequences", "3"]);
    assert!(two < makespan(&["--tokens", "1000", "--layers", "4"]));
    insta::assert_snapshot!(
        plan(&["model", "qwen3.6-27b", "--tokens", "65", "--part", "layer", "--window", "64"]).text()
    );
}

const BUDGETS: &str = r#"# Ours.
schema = 1

[[budget]]
name = "layer"
model = "qwen3.6-27b"
engine = "terrace"
part = "layer"
tokens = 60000
window = 640
most_bytes = 1 # a guess

[[budget]]
name = "mlp"
model = "qwen3.6-27b"
engine = "fla-vllm"
part = "mlp"
tokens = 4128
most_bytes = 600_000_000
"#;

#[test]
fn a_budget_that_grew_is_told_with_its_buffers_and_an_update_writes_what_is_planned() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("b.toml");
    fs::write(&file, BUDGETS).unwrap();
    let path = string(&file);
    let mut seen = String::new();
    let mut ran = |args: &[&str], status: u8| {
        let ran = plan(args);
        assert_eq!(ran.status, status, "{args:?}: {}", ran.err);
        seen += &format!("{}\n", ran.seen(folder.path()));
    };
    ran(&["check", &path], FINDING);
    ran(&["check", "--update", &path], DONE);
    let written = fs::read_to_string(&file).unwrap();
    assert!(written.contains("# a guess\n") || written.contains("# Ours.\n"));
    ran(&["check", &path], DONE);
    ran(&["check", "--update", &path], DONE);
    assert_eq!(fs::read_to_string(&file).unwrap(), written, "an update of what is up to date changes nothing");
    fs::write(&file, written.replace("window = 640\n", "")).unwrap();
    ran(&["check", &path], FINDING);
    insta::assert_snapshot!(seen);
}

#[test]
fn the_shipped_budgets_hold() {
    let folder = root().join("profiles/budgets");
    let files = fs::read_dir(&folder).unwrap().map(|entry| string(&entry.unwrap().path()));
    let mut files: Vec<String> = files.filter(|path| path.ends_with(".toml")).collect();
    files.sort();
    assert!(!files.is_empty());
    let mut args = vec!["check".to_owned()];
    args.extend(files);
    let ran = plan(&args);
    assert_eq!((ran.status, ran.err.as_str()), (DONE, ""), "{}", ran.text());
    assert!(ran.text().ends_with("none is exceeded\n"));
    // Each says what is planned, to the byte, and because of which buffers.
    let copies = tempfile::tempdir().unwrap();
    for file in &args[1..] {
        let copy = copies.path().join("copy.toml");
        fs::copy(file, &copy).unwrap();
        let ran = plan(&["check", "--update", &string(&copy)]);
        assert!(ran.text().ends_with("  nothing changes\n"), "{file}: {}", ran.text());
        assert_eq!(fs::read(&copy).unwrap(), fs::read(file).unwrap());
    }
}

#[test]
fn a_bad_budget_file_beside_a_good_one_is_named_and_the_good_one_is_checked() {
    let folder = tempfile::tempdir().unwrap();
    let (good, bad) = (folder.path().join("good.toml"), folder.path().join("bad.toml"));
    fs::write(&good, BUDGETS).unwrap();
    fs::write(&bad, BUDGETS.replace("\"mlp\"\ntokens", "\"mlps\"\ntokens")).unwrap();
    let ran = plan(&["check", &string(&bad), &string(&good)]);
    assert_eq!(ran.status, BAD_INPUT);
    assert!(ran.err.contains("bad.toml: line 13: 'mlps' is no part"), "{}", ran.err);
    assert!(ran.text().contains("2 budgets, 1 exceeded"), "{}", ran.text());
    fs::write(&bad, BUDGETS.replace("qwen3.6-27b", "gpt")).unwrap();
    let ran = plan(&["check", "--update", &string(&bad)]);
    assert_eq!(ran.status, BAD_INPUT);
    assert!(fs::read_to_string(&bad).unwrap().contains("a guess"), "nothing is written");
}

#[test]
fn a_bad_question_is_one_sentence_with_status_two() {
    let folder = tempfile::tempdir().unwrap();
    let config = string(&folder.path().join("config.json"));
    fs::write(&config, "{\"architectures\": [\"LlamaForCausalLM\"]}").unwrap();
    let fit = ["fit", "qwen3.6-27b", "--gpu", "24GiB", "--kv", "fp8"];
    let with = |rest: &[&'static str]| [&fit[..], rest].concat();
    let cases: Vec<(&str, Vec<&str>)> = vec![
        ("no such model", vec!["fit", "llama", "--gpu", "24GiB", "--kv", "fp8"]),
        ("no such file", vec!["fit", "no/where/config.json", "--gpu", "24GiB", "--kv", "fp8"]),
        ("another architecture", vec!["fit", &config, "--gpu", "24GiB", "--kv", "fp8"]),
        ("no such card", vec!["fit", "qwen3.6-27b", "--gpu", "tpu", "--kv", "fp8"]),
        ("no such format", vec!["fit", "qwen3.6-27b", "--gpu", "24GiB", "--kv", "fp9"]),
        ("no format", vec!["fit", "qwen3.6-27b", "--gpu", "24GiB"]),
        ("unknown weights", with(&["--weights", "gguf"])),
        ("bad weights", with(&["--weights", "12parsecs"])),
        ("too large a share", with(&["--util", "1.5"])),
        ("no such mode", with(&["--mamba-mode", "some"])),
        ("no tokens", with(&["--max-model-len", "0"])),
        ("no chunk", with(&["--prefill-chunk", "0"])),
        ("too many tokens", with(&["--max-model-len", "18446744073709551615"])),
        ("too many windows", with(&["--max-model-len", "1000000000000", "--window", "640"])),
        ("heads that do not split", with(&["--tp", "3"])),
        ("no cards", with(&["--tp", "0"])),
        ("an odd window", with(&["--window", "100"])),
        ("a window of a peer", with(&["--window", "640", "--engine", "fla"])),
        ("blocks and bytes", with(&["--blocks", "3", "--available", "3GiB"])),
        ("too many blocks", with(&["--blocks", "18446744073709551615"])),
        ("no size", with(&["--available", "lots"])),
        ("a picture of no sweep", with(&["-o", "x.svg"])),
        ("no tokens of a profile", vec!["model", "qwen3.6-27b", "--tokens", "0"]),
        ("no such part", vec!["model", "qwen3.6-27b", "--tokens", "64", "--part", "head"]),
        ("layers of a part", vec!["model", "qwen3.6-27b", "--tokens", "64", "--part", "mlp", "--layers", "2"]),
        ("no budgets", vec!["check"]),
        ("no such budgets", vec!["check", "no/where.toml"]),
    ];
    let mut seen = String::new();
    for (case, args) in cases {
        let ran = plan(&args);
        assert_eq!(ran.status, BAD_INPUT, "{case}: {}", ran.text());
        assert!(ran.out.is_empty(), "{case}: nothing is printed");
        let told = ran.seen(folder.path()).replace("status 2\n--- err\n", "");
        // clap's usage and hints are clap's.
        seen += &format!("{case}\n  {}\n", told.split("\n\n").next().unwrap().trim_end().replace('\n', "\n  "));
    }
    insta::assert_snapshot!(seen);
}
