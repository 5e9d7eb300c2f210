//! The canonical encoder.

use std::cmp::Ordering;

use super::{MAX_SAFE_INTEGER, Value};

impl Value {
    /// The canonical bytes of this value.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.size());
        self.encode_into(&mut out);
        out
    }

    /// About as many bytes as the value takes, so that large ones are not moved while they grow.
    fn size(&self) -> usize {
        /// The longest head of an item.
        const HEAD: usize = 9;
        HEAD + match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Text(text) => text.len(),
            Self::Array(items) => items.iter().map(Self::size).sum(),
            Self::Map(entries) => {
                entries.iter().map(|(key, value)| key.size() + value.size()).sum()
            }
            Self::Tag(_, inner) => inner.size(),
            _ => 0,
        }
    }

    /// Appends the canonical bytes of this value.
    ///
    /// Maps are written in canonical order whatever order their entries are in; of entries with
    /// the same key the last one is written.
    pub fn encode_into(&self, out: &mut Vec<u8>) {
        match self {
            Self::Uint(n) => head(0, *n, out),
            Self::Nint(n) => head(1, *n, out),
            Self::Bytes(bytes) => {
                head(2, bytes.len() as u64, out);
                out.extend_from_slice(bytes);
            }
            Self::Text(text) => {
                head(3, text.len() as u64, out);
                out.extend_from_slice(text.as_bytes());
            }
            Self::Array(elements) => {
                head(4, elements.len() as u64, out);
                for element in elements {
                    element.encode_into(out);
                }
            }
            Self::Map(entries) => map(entries, out),
            Self::Tag(tag, content) => {
                head(6, *tag, out);
                content.encode_into(out);
            }
            Self::Bool(false) => out.push(0xf4),
            Self::Bool(true) => out.push(0xf5),
            Self::Null => out.push(0xf6),
            Self::Undefined => out.push(0xf7),
            Self::Simple(n) => head(7, u64::from(*n), out),
            Self::Float(x) => float(*x, out),
        }
    }
}

/// A head in its shortest form.
fn head(major: u8, n: u64, out: &mut Vec<u8>) {
    let major = major << 5;
    let bytes = n.to_be_bytes();
    let (info, width) = match n {
        0..=23 => {
            out.push(major | bytes[7]);
            return;
        }
        24..=0xff => (24, 1),
        0x100..=0xffff => (25, 2),
        0x1_0000..=0xffff_ffff => (26, 4),
        _ => (27, 8),
    };
    out.push(major | info);
    out.extend_from_slice(&bytes[8 - width..]);
}

fn map(entries: &[(Value, Value)], out: &mut Vec<u8>) {
    let start = out.len();
    head(5, entries.len() as u64, out);
    let mut previous = start..start;
    for (key, value) in entries {
        let key_start = out.len();
        key.encode_into(out);
        if out[key_start..] <= out[previous] {
            // Not built by `Value::map` or the decoder: begin again in order.
            out.truncate(start);
            return map(&super::canonical(entries.to_vec()), out);
        }
        previous = key_start..out.len();
        value.encode_into(out);
    }
}

/// The order of two keys in a map: bytewise by encoding.
pub(super) fn key_order(a: &Value, b: &Value) -> Ordering {
    match (a, b) {
        // The usual case without encoding: a longer text has a greater head.
        (Value::Text(a), Value::Text(b)) => a.len().cmp(&b.len()).then_with(|| a.cmp(b)),
        _ => a.encode().cmp(&b.encode()),
    }
}

/// A number that JavaScript holds as a double, as its CBOR encoder writes it.
pub(super) fn float(x: f64, out: &mut Vec<u8>) {
    if x.is_nan() {
        out.extend_from_slice(&[0xf9, 0x7e, 0x00]);
        return;
    }
    let negative_zero = x == 0.0 && x.is_sign_negative();
    if x.fract() == 0.0 && x.abs() <= MAX_SAFE_INTEGER as f64 && !negative_zero {
        Value::from(x as i64).encode_into(out);
        return;
    }
    let single = x as f32;
    if f64::from(single).to_bits() != x.to_bits() {
        out.push(0xfb);
        out.extend_from_slice(&x.to_be_bytes());
    } else if let Some(half) = f32_to_f16(single) {
        out.push(0xf9);
        out.extend_from_slice(&half.to_be_bytes());
    } else {
        out.push(0xfa);
        out.extend_from_slice(&single.to_be_bytes());
    }
}

/// The half float with exactly this value, if there is one. Not for NaN.
fn f32_to_f16(x: f32) -> Option<u16> {
    let bits = x.to_bits();
    let sign = ((bits >> 16) & 0x8000) as u16;
    let exponent = ((bits >> 23) & 0xff) as i32 - 127;
    let mantissa = bits & 0x7f_ffff;
    let magnitude = match exponent {
        // Infinity; a NaN never comes here.
        128 => 0x7c00,
        // Normal halves keep ten of the 23 mantissa bits.
        -14..=15 if mantissa & 0x1fff == 0 => {
            ((exponent + 15) as u16) << 10 | (mantissa >> 13) as u16
        }
        // Subnormal halves count units of 2^-24.
        -24..=-15 => {
            let shift = (-1 - exponent) as u32;
            let whole = mantissa | 0x80_0000;
            if whole & ((1 << shift) - 1) != 0 {
                return None;
            }
            (whole >> shift) as u16
        }
        _ if bits & 0x7fff_ffff == 0 => 0,
        _ => return None,
    };
    Some(sign | magnitude)
}

/// The value of a half float.
pub(super) fn f16_to_f64(bits: u16) -> f64 {
    let exponent = i32::from(bits >> 10 & 0x1f);
    let mantissa = f64::from(bits & 0x3ff);
    let magnitude = match exponent {
        0 => mantissa * 2f64.powi(-24),
        31 if mantissa == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (mantissa + 1024.0) * 2f64.powi(exponent - 25),
    };
    if bits & 0x8000 == 0 { magnitude } else { -magnitude }
}
