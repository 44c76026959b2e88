//! The pages for operators are run: each `$ plan …` in a `console` block of README.md and planner/OPERATORS.md, in order, in a
//! folder with the files that the page shows; what is printed must be what the page says.
//!
//! A block in `toml` or `json` whose first line is `# NAME` or `// NAME` is a file of that name. `$ echo $?` prints the status of
//! the command before. `INSTA_UPDATE=always cargo test -p terrace-tests pages` writes the pages anew.

use std::fmt::Write;
use std::path::Path;
use std::{env, fs};

use terrace_planner::cli::{Console, run};
use terrace_tests::corpus::root;

#[test]
fn the_pages_for_operators_say_what_the_commands_print() {
    let mut commands = 0;
    // In one folder, since one page shows the model of both.
    let folder = tempfile::tempdir().unwrap();
    for page in ["planner/OPERATORS.md", "README.md"] {
        let path = root().join(page);
        let text = fs::read_to_string(&path).unwrap();
        let now = rerun(&text, folder.path(), &mut commands);
        if env::var("INSTA_UPDATE").is_ok_and(|update| update == "always") {
            fs::write(&path, &now).unwrap();
        } else {
            assert!(
                now == text,
                "{page} is not what is printed now; INSTA_UPDATE=always writes it: {}",
                change(&text, &now)
            );
        }
    }
    assert!(commands >= 10, "{commands} commands were run");
}

/// The page with what its commands print now.
fn rerun(page: &str, folder: &Path, commands: &mut usize) -> String {
    let mut out = String::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        writeln!(out, "{line}").unwrap();
        let Some(kind) = line.strip_prefix("```").filter(|kind| !kind.is_empty()) else { continue };
        let block: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
        if kind == "console" {
            *commands += console(&block, folder, &mut out);
        } else {
            if let Some(name) = block.first().and_then(|first| first.strip_prefix("# ").or(first.strip_prefix("// ")))
                && name.ends_with(&format!(".{kind}"))
            {
                // JSON has no comments.
                let from = usize::from(kind == "json");
                fs::write(folder.join(name), block[from..].join("\n") + "\n").unwrap();
            }
            block.iter().for_each(|line| writeln!(out, "{line}").unwrap());
        }
        writeln!(out, "```").unwrap();
    }
    out
}

/// Runs the commands of a block, and writes them and what they print.
fn console(block: &[&str], folder: &Path, out: &mut String) -> usize {
    let (mut status, mut commands) = (0, 0);
    let mut lines = block.iter().peekable();
    while let Some(line) = lines.next() {
        let Some(first) = line.strip_prefix("$ ") else { continue };
        writeln!(out, "{line}").unwrap();
        let mut command = first.to_owned();
        while let Some(start) = command.strip_suffix('\\') {
            let next = lines.next().expect("a command goes on in the next line");
            writeln!(out, "{next}").unwrap();
            command = format!("{start}{next}");
        }
        if command == "echo $?" {
            writeln!(out, "{status}").unwrap();
            continue;
        }
        let mut words = command.split_whitespace();
        assert_eq!(words.next(), Some("plan"), "only plan is run: {command}");
        let is_file =
            |word: &str| [".json", ".toml", ".svg", ".profile", ".plan"].iter().any(|end| word.ends_with(end));
        let args = words.map(|word| if is_file(word) { folder.join(word).into_os_string() } else { word.into() });
        let (mut printed, mut err) = (Vec::new(), Vec::new());
        let mut console = Console { out: &mut printed, err: &mut err, out_is_terminal: false, err_is_terminal: false };
        status = run(["plan".into()].into_iter().chain(args), &mut console);
        printed.extend(err);
        let printed = String::from_utf8(printed).unwrap();
        out.push_str(&printed.replace(&format!("{}/", folder.display()), ""));
        commands += 1;
    }
    commands
}

/// The first line that differs.
fn change(old: &str, new: &str) -> String {
    let pair = old.lines().zip(new.lines()).find(|(old, new)| old != new);
    pair.map_or_else(|| "one is longer".to_owned(), |(old, new)| format!("'{old}' is now '{new}'"))
}
