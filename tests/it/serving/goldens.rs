//! Numbers out of servers' logs: the KV pool to the digits given, and single allocations.

use serde::Deserialize;
use terrace_profiles::kv::Format;
use terrace_profiles::model::Model;
use terrace_profiles::serving::{MambaMode, Pool, Printed, available};
use terrace_profiles::shape::layer::most_chunks;
use terrace_profiles::units::Bytes;
use terrace_tests::corpus::root;

#[derive(Deserialize)]
struct File {
    kv_golden: Vec<KvGolden>,
    alloc_golden: Vec<AllocGolden>,
}

/// What a log says. Every field but the first few is a result that must be reproduced.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KvGolden {
    name: String,
    model: String,
    kv: String,
    tp: u64,
    mtp_k: u64,
    mode: Option<MambaModeName>,
    max_len: Option<u64>,
    block: Option<u64>,
    per_req: Option<u64>,
    need_gib: Option<f64>,
    /// What the pool has, as the log prints it.
    avail_gib_reported: Option<f64>,
    pool_gib_reported: Option<f64>,
    est_max_len: Option<u64>,
    blocks: Option<u64>,
    pool_gib: Option<f64>,
    tokens_old_log: Option<u64>,
    tokens_mid_log: Option<u64>,
    tokens_new_log: Option<u64>,
    concurrency: Option<f64>,
    #[allow(dead_code, reason = "where it was found")]
    cite: String,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum MambaModeName {
    None,
    Align,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AllocGolden {
    seen_mib: u64,
    exact_mib: f64,
    what: String,
}

fn file() -> File {
    let text = std::fs::read_to_string(root().join("profiles/serving/club3090.toml")).unwrap();
    toml::from_str(&text).unwrap()
}

/// The decimals of a number as the file gives it; at least two, as logs print GiB.
fn printed(number: f64) -> String {
    let shortest = number.to_string();
    let decimals = shortest.split_once('.').map_or(0, |(_, decimals)| decimals.len());
    format!("{number:.0$}", decimals.max(1))
}

fn is_printed(name: &str, golden: Option<f64>, number: f64) {
    if let Some(golden) = golden {
        let text = printed(golden);
        let decimals = text.split_once('.').unwrap().1.len();
        assert_eq!(format!("{number:.decimals$}"), text, "{name}");
    }
}

fn gib(bytes: Bytes) -> f64 {
    bytes.get() as f64 / f64::from(1 << 30)
}

#[test]
fn every_logged_kv_pool_is_reproduced_to_its_last_digit() {
    let goldens = file().kv_golden;
    assert_eq!(goldens.len(), 17);
    for golden in &goldens {
        check(golden);
    }
}

fn check(golden: &KvGolden) {
    let name = golden.name.as_str();
    let mode = match golden.mode {
        Some(MambaModeName::None) => MambaMode::None,
        Some(MambaModeName::Align) | None => MambaMode::Align,
    };
    let kv = Format::named(&golden.kv).unwrap();
    let pool = Pool::new(&Model::named(&golden.model).unwrap(), &kv, golden.tp, golden.mtp_k, mode).unwrap();
    let is = |golden: Option<u64>, number: u64| {
        if let Some(golden) = golden {
            assert_eq!(number, golden, "{name}");
        }
    };
    is(golden.block, pool.block_size);
    if let Some(max_len) = golden.max_len {
        is(golden.per_req, pool.per_request(max_len));
        is_printed(name, golden.need_gib, gib(pool.bytes(max_len).unwrap()));
    }
    if let Some(reported) = golden.avail_gib_reported {
        let printed = available(&format!("{}GiB", printed(reported))).unwrap();
        is(golden.est_max_len, pool.longest(pool.blocks_in(printed)));
        if let Some(max_len) = golden.max_len {
            assert!(pool.bytes(max_len).unwrap() > printed, "{name} was refused");
        }
    }
    if let Some(reported) = golden.pool_gib_reported {
        let bytes: Printed = printed(reported).parse().unwrap();
        for bytes in [bytes.least, bytes.most] {
            is(golden.blocks, pool.blocks_in(bytes));
        }
    }
    if let Some(blocks) = golden.blocks {
        is_printed(name, golden.pool_gib, gib(pool.bytes_of(blocks).unwrap()));
        let max_len = golden.max_len.unwrap_or(1);
        let tokens = pool.tokens(blocks, max_len);
        is(golden.tokens_old_log, tokens.old);
        is(golden.tokens_mid_log, tokens.mid);
        is(golden.tokens_new_log, tokens.new);
        is_printed(name, golden.concurrency, blocks as f64 / pool.per_request(max_len) as f64);
    }
}

#[test]
fn every_logged_allocation_is_a_buffer_of_a_layer() {
    let goldens = file().alloc_golden;
    assert_eq!(goldens.len(), 7);
    for AllocGolden { seen_mib, exact_mib, what } in goldens {
        // The tables of a layer, by what the log was about: heads, tokens, and the buffer's name.
        let (tp, tokens, part, name) = match seen_mib {
            50 => (1, 4128, "gdn", "v_new"),
            96 => (2, 8192, "gdn", "h"),
            138 => (1, 4128, "mlp", "silu"),
            276 => (1, 4128, "mlp", "gate_up"),
            24 => (1, 2048, "gdn", "o"),
            1407 => (1, 60_000, "gdn", "h"),
            768 => (2, 65_536, "gdn", "h"),
            _ => panic!("no buffer is known for {what}"),
        };
        let rank = Model::named("qwen3.6-27b").unwrap().rank(tp).unwrap();
        let table = match part {
            "mlp" => terrace_profiles::shape::layer::mlp(&rank, tokens),
            _ => terrace_profiles::shape::fla::gdn_mixer(&rank, terrace_profiles::shape::fla::Copy::Vllm, tokens, 1),
        };
        let row = table.unwrap().rows.into_iter().find(|row| row.name == name).unwrap();
        assert_eq!(row.bytes.get() as f64 / f64::from(1 << 20), exact_mib, "{what}");
        // PyTorch rounds requests above 10 MiB up to 2 MiB.
        let seen = row.bytes.get().next_multiple_of(2 << 20) >> 20;
        assert!(seen == seen_mib || exact_mib == seen_mib as f64, "{what}: {seen}");
    }
    assert_eq!(most_chunks(60_000, 1), 938);
}
