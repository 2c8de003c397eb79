//! Just enough of Rust's lexical grammar to tell code from comments and literals, and to find where
//! functions and test modules begin and end.

/// One source file in two shapes of equal length, line for line.
pub(crate) struct Source {
    /// As written.
    pub(crate) text: String,
    /// Comments and the insides of literals replaced by spaces.
    pub(crate) code: String,
}

/// A function with a body; lines count from 1.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) first: usize,
    pub(crate) last: usize,
}

impl Source {
    pub(crate) fn new(text: &str) -> Self {
        Self {
            text: text.to_owned(),
            code: blank(text),
        }
    }

    /// Lines on which `word` stands as a whole word of code.
    pub(crate) fn lines_with(&self, word: &str) -> Vec<usize> {
        let is_part = |c: char| c.is_alphanumeric() || c == '_';
        let mut lines = Vec::new();
        for (number, line) in self.code.lines().enumerate() {
            let stands = line.match_indices(word).any(|(at, _)| {
                !line[..at].ends_with(is_part) && !line[at + word.len()..].starts_with(is_part)
            });
            if stands {
                lines.push(number + 1);
            }
        }
        lines
    }

    /// Every function that has a body.
    pub(crate) fn functions(&self) -> Vec<Function> {
        let bytes = self.code.as_bytes();
        let mut found = Vec::new();
        for (at, _) in self.code.match_indices("fn ") {
            let word = at == 0 || !(bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_');
            let name: String = self.code[at + 3..]
                .chars()
                .take_while(|c| c.is_alphanumeric() || *c == '_')
                .collect();
            if !word || name.is_empty() {
                continue;
            }
            if let Some((_, end)) = self.body(at) {
                found.push(Function {
                    name,
                    first: self.line_at(at),
                    last: self.line_at(end),
                });
            }
        }
        found
    }

    /// Lines outside `#[cfg(test)]` modules.
    pub(crate) fn production_lines(&self) -> usize {
        let mut lines = self.text.lines().count();
        let mut from = 0;
        while let Some(found) = self.code[from..].find("#[cfg(test)]") {
            let at = from + found;
            from = at + 1;
            if let Some((_, end)) = self.body(at + "#[cfg(test)]".len()) {
                lines -= self.line_at(end) - self.line_at(at) + 1;
                from = end;
            }
        }
        lines
    }

    /// The braces of the item at `at`: the first ones outside brackets, unless a `;` comes first.
    fn body(&self, at: usize) -> Option<(usize, usize)> {
        let bytes = self.code.as_bytes();
        let mut nesting = 0_usize;
        let mut start = None;
        for (index, byte) in bytes.iter().enumerate().skip(at) {
            match (byte, start) {
                (b'(' | b'[', None) => nesting += 1,
                (b')' | b']', None) => nesting = nesting.saturating_sub(1),
                (b';', None) if nesting == 0 => return None,
                (b'{', None) if nesting == 0 => {
                    start = Some(index);
                    nesting = 1;
                }
                (b'{', Some(_)) => nesting += 1,
                (b'}', Some(first)) => {
                    nesting -= 1;
                    if nesting == 0 {
                        return Some((first, index));
                    }
                }
                _ => {}
            }
        }
        None
    }

    fn line_at(&self, at: usize) -> usize {
        self.code[..at].matches('\n').count() + 1
    }
}

/// Replaces comments and the insides of string and character literals by spaces. Newlines stay, and
/// every other byte keeps its place.
fn blank(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut code = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = literal_end(bytes, at);
        if end == at {
            at += 1;
            continue;
        }
        for byte in &mut code[at..end] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
        at = end;
    }
    String::from_utf8_lossy(&code).into_owned()
}

/// Where the comment or literal that begins at `at` ends; `at` itself if none begins here.
fn literal_end(bytes: &[u8], at: usize) -> usize {
    let rest = &bytes[at..];
    let after_word = at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_');
    if rest.starts_with(b"//") {
        return at
            + rest
                .iter()
                .position(|byte| *byte == b'\n')
                .unwrap_or(rest.len());
    }
    if rest.starts_with(b"/*") {
        return at + comment_len(rest);
    }
    if rest[0] == b'"' {
        return at + quoted_len(rest, b'"');
    }
    if rest[0] == b'r' && (!after_word || bytes[at - 1] == b'b') {
        let hashes = rest[1..].iter().take_while(|byte| **byte == b'#').count();
        if rest.get(1 + hashes) == Some(&b'"') {
            let close = [&b"\""[..], &b"#".repeat(hashes)].concat();
            let body = &rest[2 + hashes..];
            let len = body.windows(close.len()).position(|window| window == close);
            return at + len.map_or(rest.len(), |len| 2 + hashes + len + close.len());
        }
    }
    if rest[0] == b'\'' {
        // A lifetime has no closing quote right after its first character.
        let escaped = rest.get(1) == Some(&b'\\');
        let width = rest.get(1).map_or(1, |byte| match byte {
            0xf0.. => 4,
            0xe0.. => 3,
            0xc0.. => 2,
            _ => 1,
        });
        if escaped || rest.get(1 + width) == Some(&b'\'') {
            return at + quoted_len(rest, b'\'');
        }
    }
    at
}

fn quoted_len(rest: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while at < rest.len() && rest[at] != quote {
        at += if rest[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(rest.len())
}

/// Block comments nest.
fn comment_len(rest: &[u8]) -> usize {
    let (mut at, mut depth) = (2, 1);
    while at < rest.len() && depth > 0 {
        if rest[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
        } else {
            at += 1;
        }
    }
    at.min(rest.len())
}
