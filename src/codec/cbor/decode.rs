//! The strict decoder.

use super::{CborError, CborErrorKind, Value, encode};

/// Deepest nesting accepted.
///
/// Real frames nest about ten deep (tokens nest inside byte strings, which do not count). The
/// reference allows 1024; 64 keeps recursion, also of everything that later walks a value, far
/// from any thread's stack.
pub const MAX_DEPTH: usize = 64;

/// Most items in one input.
///
/// An item of one byte becomes a value of [`size_of::<Value>()`] bytes, so this bounds what a
/// frame of the largest size can cost in memory. Records of a real state snapshot take at least
/// sixteen bytes an item, so a snapshot of 64 MiB still passes.
pub const MAX_ITEMS: usize = 1 << 22;

/// Room reserved for an array or map before its elements have been seen; an announced length is
/// no reason to use memory.
const MAX_RESERVED: usize = 16;

/// Tags that the reference's decoder strips or rewrites (date text, byte view, self-description):
/// a signature over them would not survive it.
const REWRITTEN_TAGS: [u64; 3] = [0, 64, 55_799];

/// Reads exactly one canonical item.
///
/// # Errors
/// [`CborError`] for anything that [`Value::encode`] would not write, and for more than
/// [`MAX_DEPTH`] or [`MAX_ITEMS`].
pub fn decode(input: &[u8]) -> Result<Value, CborError> {
    let mut decoder = Decoder { input, at: 0, items: 0 };
    let value = decoder.item(0)?;
    if decoder.at == input.len() {
        Ok(value)
    } else {
        Err(CborError { kind: CborErrorKind::TrailingBytes, offset: decoder.at })
    }
}

struct Decoder<'a> {
    input: &'a [u8],
    at: usize,
    items: usize,
}

impl<'a> Decoder<'a> {
    fn fail<T>(&self, kind: CborErrorKind, offset: usize) -> Result<T, CborError> {
        Err(CborError { kind, offset })
    }

    fn take(&mut self, n: usize) -> Result<&'a [u8], CborError> {
        let end = self.at.checked_add(n);
        match end.and_then(|end| self.input.get(self.at..end)) {
            Some(bytes) => {
                self.at += n;
                Ok(bytes)
            }
            None => self.fail(CborErrorKind::Truncated, self.at),
        }
    }

    fn number(&mut self, width: usize) -> Result<u64, CborError> {
        Ok(self.take(width)?.iter().fold(0, |n, b| n << 8 | u64::from(*b)))
    }

    /// The argument of a head whose initial byte has been read.
    fn argument(&mut self, info: u8, start: usize) -> Result<u64, CborError> {
        let (width, least) = match info {
            0..=23 => return Ok(u64::from(info)),
            24 => (1, 24),
            25 => (2, 1 << 8),
            26 => (4, 1 << 16),
            27 => (8, 1 << 32),
            31 => return self.fail(CborErrorKind::IndefiniteLength, start),
            _ => return self.fail(CborErrorKind::Reserved, start),
        };
        let n = self.number(width)?;
        if n < least { self.fail(CborErrorKind::OverlongHead, start) } else { Ok(n) }
    }

    /// A length in items of at least `least` bytes each: refused at once when the rest of the
    /// input cannot hold them.
    fn length(&mut self, info: u8, start: usize, least: usize) -> Result<usize, CborError> {
        let n = self.argument(info, start)?;
        let rest = self.input.len() - self.at;
        match usize::try_from(n) {
            Ok(n) if n <= rest / least => Ok(n),
            _ => self.fail(CborErrorKind::Truncated, start),
        }
    }

    fn item(&mut self, depth: usize) -> Result<Value, CborError> {
        let start = self.at;
        self.items += 1;
        if self.items > MAX_ITEMS {
            return self.fail(CborErrorKind::TooManyItems, start);
        }
        let initial = self.number(1)?;
        let (major, info) = ((initial >> 5) as u8, (initial & 31) as u8);
        if (4..=6).contains(&major) && depth == MAX_DEPTH {
            return self.fail(CborErrorKind::TooDeep, start);
        }
        match major {
            0 => Ok(Value::Uint(self.argument(info, start)?)),
            1 => Ok(Value::Nint(self.argument(info, start)?)),
            2 => {
                let n = self.length(info, start, 1)?;
                Ok(Value::Bytes(self.take(n)?.to_vec()))
            }
            3 => {
                let n = self.length(info, start, 1)?;
                match std::str::from_utf8(self.take(n)?) {
                    Ok(text) => Ok(Value::Text(text.to_owned())),
                    Err(_) => self.fail(CborErrorKind::InvalidText, start),
                }
            }
            4 => {
                let n = self.length(info, start, 1)?;
                let mut elements = Vec::with_capacity(n.min(MAX_RESERVED));
                for _ in 0..n {
                    elements.push(self.item(depth + 1)?);
                }
                Ok(Value::Array(elements))
            }
            5 => self.map(info, start, depth),
            6 => self.tag(info, start, depth),
            _ => self.simple_or_float(info, start),
        }
    }

    fn map(&mut self, info: u8, start: usize, depth: usize) -> Result<Value, CborError> {
        let n = self.length(info, start, 2)?;
        let mut entries = Vec::with_capacity(n.min(MAX_RESERVED));
        let mut previous: &[u8] = &[];
        for _ in 0..n {
            let key_start = self.at;
            let key = self.item(depth + 1)?;
            let encoded = self.input.get(key_start..self.at).unwrap_or_default();
            if encoded <= previous {
                return self.fail(CborErrorKind::KeyOrder, key_start);
            }
            previous = encoded;
            entries.push((key, self.item(depth + 1)?));
        }
        Ok(Value::Map(entries))
    }

    fn tag(&mut self, info: u8, start: usize, depth: usize) -> Result<Value, CborError> {
        let tag = self.argument(info, start)?;
        let content = self.item(depth + 1)?;
        let allowed = match tag {
            // Bignums: only what no ordinary integer holds, without leading zeros.
            2 | 3 => content.as_bytes().is_some_and(|b| b.len() > 8 && b.first() != Some(&0)),
            // URI, base64, regular expression, MIME: the content is text.
            32..=36 => content.as_text().is_some(),
            _ => !REWRITTEN_TAGS.contains(&tag),
        };
        if allowed {
            Ok(Value::Tag(tag, Box::new(content)))
        } else {
            self.fail(CborErrorKind::InvalidTag, start)
        }
    }

    fn simple_or_float(&mut self, info: u8, start: usize) -> Result<Value, CborError> {
        let float = match info {
            20 => return Ok(Value::Bool(false)),
            21 => return Ok(Value::Bool(true)),
            22 => return Ok(Value::Null),
            23 => return Ok(Value::Undefined),
            0..=19 => return Ok(Value::Simple(info)),
            24 => {
                let n = self.number(1)? as u8;
                return match n {
                    32.. => Ok(Value::Simple(n)),
                    _ => self.fail(CborErrorKind::InvalidSimple, start),
                };
            }
            25 => encode::f16_to_f64(self.number(2)? as u16),
            26 => f64::from(f32::from_bits(self.number(4)? as u32)),
            27 => f64::from_bits(self.number(8)?),
            31 => return self.fail(CborErrorKind::IndefiniteLength, start),
            _ => return self.fail(CborErrorKind::Reserved, start),
        };
        let mut shortest = Vec::with_capacity(9);
        encode::float(float, &mut shortest);
        if self.input.get(start..self.at) == Some(shortest.as_slice()) {
            Ok(Value::Float(float))
        } else {
            self.fail(CborErrorKind::NotShortest, start)
        }
    }
}
