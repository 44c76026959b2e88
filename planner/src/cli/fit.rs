//! `plan fit`: will a server fit on a card, and if not, what to change.

use std::path::Path;
use std::process;

use terrace_profiles::cards::Card;
use terrace_profiles::kv;
use terrace_profiles::model::Model;
use terrace_profiles::serving::{Ask, Given, Held, MAX_LEN};
use terrace_profiles::synth::Lifetimes;
use terrace_profiles::units::Bytes;

use super::args::{Fit, FitFormat};
use super::model::engine_of;
use super::output::Output;
use super::{Console, DONE, FINDING, Failure, failed_write};
use crate::fitting::Fitter;
use crate::report::{Picture, Server};

pub fn run(args: &Fit, colour: bool, console: &mut Console<'_>) -> Result<u8, Failure> {
    let model = Model::open(&args.model)?;
    let card = match args.gpu.as_str() {
        "auto" => free("nvidia-smi", args.tp).map_err(Failure::Usage)?,
        name => Card::open(name)?,
    };
    let ask = ask(args, &model, &card)?;
    let mut fitter = Fitter::new(&model, std::thread::available_parallelism().map_or(1, usize::from));
    if args.sweep {
        return sweep(args, &model, &card, &ask, &mut fitter, colour, console);
    }
    let answer = fitter.answer(&ask)?;
    let server =
        Server { model: &model, card: (&card.id, &card.source), ask: &ask, answer: &answer, failed: args.failed };
    let mut bytes = Vec::new();
    let written = match args.format {
        FitFormat::Text => server.write_text(colour, &mut bytes),
        FitFormat::Json => server.write_json(&mut bytes),
    };
    print(written, &bytes, console)?;
    Ok(if answer.fit.fits { DONE } else { FINDING })
}

fn sweep(
    args: &Fit,
    model: &Model,
    card: &Card,
    ask: &Ask,
    fitter: &mut Fitter<'_>,
    colour: bool,
    console: &mut Console<'_>,
) -> Result<u8, Failure> {
    let formats = match &args.kv {
        Some(kv) => vec![kv.clone()],
        // Formats of a server that shares no blocks are another server's.
        None => kv::Format::all().into_iter().filter(|format| !format.contiguous).collect(),
    };
    let sweep = fitter.sweep(ask, &formats)?;
    let engine = match ask.window {
        Some(window) => format!("{} in windows of {window}", ask.engine),
        None => ask.engine.to_string(),
    };
    let title = format!("{} on {}, --util {}, weights {}, {engine}", model.id, card.id, ask.util, ask.weights.bytes);
    let picture = Picture { title: &title, asked: ask.max_len, sweep: &sweep };
    let mut bytes = Vec::new();
    if let Some(path) = &args.output {
        picture.write_svg(&mut bytes).map_err(|source| failed_write(path, source))?;
        Output::to(path, console.out).write(&bytes)?;
        bytes.clear();
        // A picture on standard output stands there alone.
        if path.as_os_str() == "-" {
            return Ok(DONE);
        }
    }
    let written = match args.format {
        FitFormat::Text => picture.write_text(colour, &mut bytes),
        FitFormat::Json => picture.write_json(&mut bytes),
    };
    print(written, &bytes, console)?;
    Ok(DONE)
}

fn print(written: std::io::Result<()>, bytes: &[u8], console: &mut Console<'_>) -> Result<(), Failure> {
    written.map_err(|source| failed_write(Path::new("-"), source))?;
    Output::to(Path::new("-"), console.out).write(bytes)
}

fn ask(args: &Fit, model: &Model, card: &Card) -> Result<Ask, Failure> {
    let Some(max_len) = args.max_model_len.or(model.max_context) else {
        let reason = format!("{} does not say how long a context it was made for; give --max-model-len", model.id);
        return Err(Failure::Usage(reason));
    };
    if let Some(tokens) = [Some(max_len), args.prefill_chunk].into_iter().flatten().find(|tokens| *tokens > MAX_LEN) {
        return Err(Failure::Usage(format!("{tokens} tokens are more than {MAX_LEN}, the most of --max-model-len")));
    }
    let kv = match &args.kv {
        Some(kv) => kv.clone(),
        None => kv::Format::named("auto")?,
    };
    let engine = args.engine.unwrap_or_else(|| engine_of(args.window));
    Ok(Ask {
        util: args.util,
        max_seqs: args.max_num_seqs,
        chunk: args.prefill_chunk,
        mtp: args.mtp,
        tp: args.tp,
        mode: args.mamba_mode,
        engine,
        lifetimes: args.lifetimes.unwrap_or_else(|| Lifetimes::of(engine)),
        window: args.window,
        overhead: args.overhead,
        pool: match (args.available, args.blocks) {
            (Some(bytes), _) => Given::Available(bytes),
            (None, Some(blocks)) => Given::Blocks(blocks),
            (None, None) => Given::Nothing,
        },
        ..Ask::new(card.usable, kv, weights(args, model)?, max_len)
    })
}

fn weights(args: &Fit, model: &Model) -> Result<Held, Failure> {
    let format = match &args.weights {
        // Formats begin with a letter.
        Some(text) if text.starts_with(|c: char| c.is_ascii_digit()) => {
            let bytes: Bytes = text.parse().map_err(|error| Failure::Usage(format!("--weights: {error}")))?;
            return Ok(Held::given(bytes));
        }
        Some(format) => format,
        None => model.weights.first().map_or("bf16", |weights| weights.format.as_str()),
    };
    Ok(Held::weights(model, format, args.tp)?)
}

/// What `nvidia-smi` says is free on the fullest of the first `cards` cards.
fn free(program: &str, cards: u64) -> Result<Card, String> {
    const ASKED: [&str; 2] = ["--query-gpu=memory.total,memory.used", "--format=csv,noheader,nounits"];
    let instead = "give --gpu a card or its memory, such as 24GiB";
    let ran = process::Command::new(program)
        .args(ASKED)
        .output()
        .map_err(|error| format!("--gpu auto asks {program}, which cannot be run ({error}); {instead}"))?;
    if !ran.status.success() {
        return Err(format!("--gpu auto asks {program}, which failed ({}); {instead}", ran.status));
    }
    fullest(&String::from_utf8_lossy(&ran.stdout), cards).map_err(|reason| format!("{program} {reason}; {instead}"))
}

/// Reads lines of total and used MiB, one for each card.
fn fullest(text: &str, cards: u64) -> Result<Card, String> {
    let mut free: Vec<(Bytes, u64, u64)> = Vec::new();
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let wrong = || format!("printed '{}', not total and used MiB", line.trim().escape_debug());
        let (total, used) = line.split_once(',').ok_or_else(wrong)?;
        let (total, used): (u64, u64) =
            (total.trim().parse().map_err(|_| wrong())?, used.trim().parse().map_err(|_| wrong())?);
        let left = total.saturating_sub(used).checked_mul(1 << 20).and_then(Bytes::new).ok_or_else(wrong)?;
        free.push((left, total, used));
    }
    let known = free.len();
    if (known as u64) < cards || known == 0 {
        return Err(format!("lists {known} of the {cards} cards that are asked for"));
    }
    let first = free.into_iter().take(usize::try_from(cards).unwrap_or(usize::MAX));
    let (usable, total, used) = first.min().ok_or_else(|| "lists no card".to_owned())?;
    let source = format!("nvidia-smi: {total} MiB, {used} of them in use");
    Ok(Card { id: "the card here".to_owned(), usable, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fullest_of_the_cards_counts() {
        let card = fullest("24576, 512\n24576, 2048\n24576, 9999\n", 2).unwrap();
        assert_eq!(card.usable.get(), (24_576 - 2048) << 20);
        assert_eq!(card.source, "nvidia-smi: 24576 MiB, 2048 of them in use");
        assert_eq!(fullest("24576, 0", 2).unwrap_err(), "lists 1 of the 2 cards that are asked for");
        assert_eq!(fullest("", 0).unwrap_err(), "lists 0 of the 0 cards that are asked for");
        assert_eq!(fullest("[N/A], 3", 1).unwrap_err(), "printed '[N/A], 3', not total and used MiB");
    }

    #[test]
    fn a_machine_without_nvidia_smi_is_told_what_to_give() {
        let error = free("no-such-nvidia-smi", 1).unwrap_err();
        assert!(error.starts_with("--gpu auto asks no-such-nvidia-smi, which cannot be run ("), "{error}");
        assert!(error.ends_with("; give --gpu a card or its memory, such as 24GiB"), "{error}");
    }
}
