//! Whether a server fits, for people and for scripts: the ledger of a card line by line, the pool, and what to change.
//!
//! ```text
//!   ledger   what the lines take, the card's share, what is left for the pool | what one request needs of the pool
//!   pool     a block, the blocks there are, the pool in tokens as servers print it
//!   arena    what is alive at its peak; or, asked after a request that failed, which buffer that was
//!   changes  only where it does not fit: each with its own verdict
//! ```

use std::io::{self, Write};

use terrace_profiles::model::Model;
use terrace_profiles::serving::{Ask, Given, Line};
use terrace_profiles::units::Bytes;

use super::json::write_line;
use super::text::{Paint, clean, printable};
use crate::fitting::{Answer, Choice};

mod json;

/// Rows of what is alive at the peak.
const MOST_ROWS: usize = 6;

/// A server and the answer about it.
#[derive(Clone, Copy, Debug)]
pub struct Server<'a> {
    /// The model.
    pub model: &'a Model,
    /// What the card is called, and who says what it has.
    pub card: (&'a str, &'a str),
    /// What was asked.
    pub ask: &'a Ask,
    /// What came of it.
    pub answer: &'a Answer,
    /// A request that failed, as an out-of-memory message prints it.
    pub failed: Option<Bytes>,
}

impl Server<'_> {
    /// Writes the report for a terminal.
    ///
    /// # Errors
    /// What `out` reports.
    pub fn write_text(&self, colour: bool, out: &mut dyn Write) -> io::Result<()> {
        let paint = Paint(colour);
        self.head(&paint, out)?;
        self.ledger(&paint, out)?;
        self.pool(&paint, out)?;
        match self.failed {
            Some(failed) => self.failed(failed, &paint, out)?,
            None => self.arena(&paint, out)?,
        }
        if !self.answer.choices.is_empty() {
            self.changes(&paint, out)?;
        }
        Ok(())
    }

    /// Writes one JSON object on one line.
    ///
    /// # Errors
    /// What `out` reports.
    pub fn write_json(&self, out: &mut dyn Write) -> io::Result<()> {
        write_line(&json::Json::of(self), out)
    }

    fn head(&self, paint: &Paint, out: &mut dyn Write) -> io::Result<()> {
        let (ask, fit) = (self.ask, &self.answer.fit);
        let cards = match ask.tp {
            1 => String::new(),
            cards => format!(", on each of {cards} cards"),
        };
        let title = format!(
            "{} on {}{cards}: {} tokens, keys and values in {}",
            clean(&self.model.id),
            printable(self.card.0),
            ask.max_len,
            ask.kv.id
        );
        writeln!(out, "{}", paint.bold(&title))?;
        let given = ask.pool != Given::Nothing;
        let verdict = match (fit.fits, fit.boots) {
            _ if !fit.refused.is_empty() => paint.bad("refused"),
            (true, _) if given => paint.good("the pool holds it"),
            (true, _) => paint.good("fits"),
            (false, _) if given => paint.bad("the pool does not hold it"),
            (false, true) => paint.bad("starts, and dies on a long prompt"),
            (false, false) => paint.bad("does not fit"),
        };
        let room = match fit.available.checked_sub(fit.need) {
            Some(room) => format!("{} to spare", gib(room)),
            None => format!("{} short", gib(fit.need.checked_sub(fit.available).unwrap_or(Bytes::ZERO))),
        };
        writeln!(
            out,
            "  {verdict}: one request needs {} of the pool, which has {}, {room}",
            gib(fit.need),
            gib(fit.available)
        )?;
        for sentence in &fit.refused {
            writeln!(out, "  {}", paint.bad(sentence))?;
        }
        for sentence in &fit.notes {
            writeln!(out, "  {}", paint.warn(sentence))?;
        }
        let largest = match fit.largest_context {
            0 => "no context fits".to_owned(),
            _ if given => format!("the pool holds a request of {} tokens", fit.max_model_len_estimate),
            tokens => format!("the largest context that fits is {tokens} tokens"),
        };
        writeln!(out, "  {largest}")
    }

    fn ledger(&self, paint: &Paint, out: &mut dyn Write) -> io::Result<()> {
        let (ask, fit) = (self.ask, &self.answer.fit);
        writeln!(out, "\n{}", paint.bold("ledger of a card"))?;
        let row = |out: &mut dyn Write, bytes: Bytes, kind: &str, name: &str, how: &str| {
            let line = format!("  {bytes:>10}  {:>12} B  {kind:<8}  {name:<21}  {how}", bytes.get());
            writeln!(out, "{}", line.trim_end())
        };
        let lines = |out: &mut dyn Write, lines: &[Line]| -> io::Result<Bytes> {
            let mut sum = Bytes::ZERO;
            for line in lines {
                row(out, line.bytes, line.kind.name(), line.name, &line.how)?;
                sum = sum.checked_add(line.bytes).unwrap_or(sum);
            }
            Ok(sum)
        };
        let (pool, others) = fit.ledger.split_at(2);
        let taken = lines(out, others)?;
        row(out, taken, "", "together", "")?;
        let (card, source) = self.card;
        let share = format!("{} of {} B, {}", ask.util, ask.usable.get(), printable(source));
        match ask.pool {
            Given::Nothing => {
                row(out, fit.budget, "", "the card's share", &share)?;
                row(out, fit.available, "", "left for the pool", "")?;
            }
            Given::Available(_) | Given::Blocks(_) => {
                row(out, fit.available, "measured", "the pool", "given")?;
                let both = taken.checked_add(fit.available).unwrap_or(taken);
                row(out, both, "", "all of it", "")?;
                row(out, ask.usable, "", "the card", &format!("{}, {}", printable(card), printable(source)))?;
                match ask.usable.checked_sub(both) {
                    Some(left) => row(out, left, "", "left", "for fragments, and for all that grows")?,
                    None => row(out, both.checked_sub(ask.usable).unwrap_or(Bytes::ZERO), "", "too much", "")?,
                }
            }
        }
        writeln!(out)?;
        let need = lines(out, pool)?;
        row(out, need, "", "one request's need", "")
    }

    fn pool(&self, paint: &Paint, out: &mut dyn Write) -> io::Result<()> {
        let (ask, fit) = (self.ask, &self.answer.fit);
        let pool = &fit.pool;
        writeln!(out, "\n{}", paint.bold("pool"))?;
        let mut row = |key: &str, text: String| writeln!(out, "  {key:<18}  {text}");
        row(
            "a block",
            format!(
                "{} tokens, {} B: {} layers x {} B",
                pool.block_size,
                pool.block_bytes.get(),
                pool.group,
                pool.page.get()
            ),
        )?;
        row(
            "blocks",
            format!(
                "{} for one request, {} in the pool: {:.2} requests of {} tokens at once",
                fit.blocks_per_request, fit.blocks, fit.concurrency, ask.max_len
            ),
        )?;
        row("longest request", format!("{} tokens, were the pool of this size", fit.max_model_len_estimate))?;
        let tokens = fit.tokens;
        row("tokens, old", format!("{}: blocks x block", tokens.old))?;
        row("tokens, mid", format!("{}: blocks / groups x block", tokens.mid))?;
        row("tokens, new", format!("{}: blocks / blocks of a request x its tokens", tokens.new))
    }

    fn arena(&self, paint: &Paint, out: &mut dyn Write) -> io::Result<()> {
        let rows = &self.answer.arena.at_peak;
        writeln!(out, "\n{}", paint.bold("activation arena at its peak"))?;
        for (label, bytes) in rows.iter().take(MOST_ROWS) {
            writeln!(out, "  {bytes:>10}  {:>12} B  {}", bytes.get(), printable(label))?;
        }
        match rows.get(MOST_ROWS..).filter(|rest| !rest.is_empty()) {
            None => Ok(()),
            Some(rest) => {
                let bytes: u64 = rest.iter().map(|(_, bytes)| bytes.get()).sum();
                let sum = Bytes::new(bytes).unwrap_or(Bytes::ZERO);
                writeln!(out, "  {sum:>10}  {bytes:>12} B  {} more", rest.len())
            }
        }
    }

    /// Which buffers a message of that size can be about.
    fn failed(&self, failed: Bytes, paint: &Paint, out: &mut dyn Write) -> io::Result<()> {
        let title = format!("who asked for {failed}: requests of a prefill step as PyTorch rounds them");
        writeln!(out, "\n{}", paint.bold(&title))?;
        let requests = &self.answer.arena.requests;
        let exact: Vec<&(String, Bytes)> =
            requests.iter().filter(|(_, bytes)| as_torch_asks(*bytes) == failed).collect();
        let mut row = |mark: &str, (label, bytes): &(String, Bytes)| {
            let asked = as_torch_asks(*bytes);
            writeln!(out, "  {asked:>10}  {:>12} B  {mark:<12}  {}", bytes.get(), printable(label))
        };
        let above = requests.iter().rev().find(|(_, bytes)| as_torch_asks(*bytes) > failed);
        let below = requests.iter().find(|(_, bytes)| as_torch_asks(*bytes) < failed);
        if let Some(above) = above {
            row("next larger", above)?;
        }
        for request in &exact {
            row("this size", request)?;
        }
        if exact.is_empty() {
            row("nothing", &("no buffer of this step".to_owned(), Bytes::ZERO))?;
        }
        below.map_or(Ok(()), |below| row("next smaller", below))
    }

    fn changes(&self, paint: &Paint, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "\n{}", paint.bold("what to change"))?;
        let choices = &self.answer.choices;
        let wide = choices.iter().map(|choice| choice.what.chars().count()).max().unwrap_or(0);
        for Choice { what, fit } in choices {
            let verdict = match (fit.fits, fit.boots) {
                _ if !fit.refused.is_empty() => paint.bad("refused     "),
                (true, _) => paint.good("fits        "),
                (false, true) => paint.warn("starts, dies"),
                (false, false) => paint.bad("does not fit"),
            };
            let numbers = match fit.refused.first() {
                Some(_) => format!("a block has {} tokens", fit.pool.block_size),
                None => {
                    let largest = fit.largest_context;
                    format!(
                        "need {:>10}, pool {:>10}, arena {:>10}, largest {largest}",
                        fit.need, fit.available, fit.arena
                    )
                }
            };
            writeln!(out, "  {what:<wide$}  {verdict}  {numbers}")?;
        }
        let refused = choices.iter().find_map(|choice| choice.fit.refused.first());
        if let (Some(sentence), true) = (refused, self.answer.fit.refused.is_empty()) {
            writeln!(out, "  {}", paint.dim(sentence))?;
        }
        Ok(())
    }
}

/// A size as servers' logs print the pool, with four decimals instead of two.
fn gib(bytes: Bytes) -> String {
    format!("{:.4} GiB", bytes.get() as f64 / f64::from(1 << 30))
}

/// What PyTorch's caching allocator asks the driver for where a request finds no free block: the number in its
/// out-of-memory message.
fn as_torch_asks(bytes: Bytes) -> Bytes {
    const MIB: u64 = 1 << 20;
    let asked = match bytes.get() {
        0 => 0,
        b if b <= MIB => 2 * MIB,
        b if b < 10 * MIB => 20 * MIB,
        b => b.next_multiple_of(2 * MIB),
    };
    Bytes::new(asked).unwrap_or(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_rounded_as_pytorch_rounds_it() {
        let asked = |bytes| as_torch_asks(Bytes::new(bytes).unwrap()).get();
        assert_eq!(asked(4128 * 34_816 * 2), 276 << 20);
        assert_eq!(asked(4128 * 17_408 * 2), 138 << 20);
        assert_eq!((asked(0), asked(1), asked(1 << 20)), (0, 2 << 20, 2 << 20));
        assert_eq!((asked((1 << 20) + 1), asked(10 << 20), asked((10 << 20) + 1)), (20 << 20, 10 << 20, 12 << 20));
    }
}
