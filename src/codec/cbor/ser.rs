//! From Rust types to values, with serde's self-describing conventions.

use serde::Serialize;
use serde::ser::{
    SerializeMap, SerializeSeq, SerializeStruct, SerializeStructVariant, SerializeTuple,
    SerializeTupleStruct, SerializeTupleVariant, Serializer,
};

use super::{ConvertError, Value};

/// The value that stands for `data`: structs are text-keyed maps, `None` and `()` are null, unit
/// variants their name, bytes (`serialize_bytes`) a byte string.
///
/// # Errors
/// [`ConvertError`] when `data`'s own `Serialize` fails.
pub fn to_value<T: Serialize + ?Sized>(data: &T) -> Result<Value, ConvertError> {
    data.serialize(ToValue)
}

struct ToValue;

/// The elements of an array, or the content of a variant `name`.
struct Elements {
    variant: Option<&'static str>,
    elements: Vec<Value>,
}

/// The entries of a map or struct, or the content of a variant `name`.
struct Entries {
    variant: Option<&'static str>,
    entries: Vec<(Value, Value)>,
    key: Option<Value>,
}

fn in_variant(variant: Option<&'static str>, content: Value) -> Value {
    match variant {
        Some(name) => Value::map([(name, content)]),
        None => content,
    }
}

impl Elements {
    fn new(variant: Option<&'static str>) -> Self {
        Self { variant, elements: Vec::new() }
    }

    fn push<T: Serialize + ?Sized>(&mut self, data: &T) -> Result<(), ConvertError> {
        self.elements.push(to_value(data)?);
        Ok(())
    }

    fn finish(self) -> Value {
        in_variant(self.variant, Value::Array(self.elements))
    }
}

impl Entries {
    fn new(variant: Option<&'static str>) -> Self {
        Self { variant, entries: Vec::new(), key: None }
    }

    fn push<T: Serialize + ?Sized>(&mut self, key: Value, data: &T) -> Result<(), ConvertError> {
        self.entries.push((key, to_value(data)?));
        Ok(())
    }

    fn finish(self) -> Value {
        in_variant(self.variant, Value::map(self.entries))
    }
}

impl Serializer for ToValue {
    type Ok = Value;
    type Error = ConvertError;
    type SerializeSeq = Elements;
    type SerializeTuple = Elements;
    type SerializeTupleStruct = Elements;
    type SerializeTupleVariant = Elements;
    type SerializeMap = Entries;
    type SerializeStruct = Entries;
    type SerializeStructVariant = Entries;

    fn serialize_bool(self, b: bool) -> Result<Value, ConvertError> {
        Ok(Value::Bool(b))
    }

    fn serialize_i8(self, n: i8) -> Result<Value, ConvertError> {
        self.serialize_i64(i64::from(n))
    }

    fn serialize_i16(self, n: i16) -> Result<Value, ConvertError> {
        self.serialize_i64(i64::from(n))
    }

    fn serialize_i32(self, n: i32) -> Result<Value, ConvertError> {
        self.serialize_i64(i64::from(n))
    }

    fn serialize_i64(self, n: i64) -> Result<Value, ConvertError> {
        Ok(Value::from(n))
    }

    fn serialize_u8(self, n: u8) -> Result<Value, ConvertError> {
        self.serialize_u64(u64::from(n))
    }

    fn serialize_u16(self, n: u16) -> Result<Value, ConvertError> {
        self.serialize_u64(u64::from(n))
    }

    fn serialize_u32(self, n: u32) -> Result<Value, ConvertError> {
        self.serialize_u64(u64::from(n))
    }

    fn serialize_u64(self, n: u64) -> Result<Value, ConvertError> {
        Ok(Value::Uint(n))
    }

    fn serialize_f32(self, x: f32) -> Result<Value, ConvertError> {
        self.serialize_f64(f64::from(x))
    }

    fn serialize_f64(self, x: f64) -> Result<Value, ConvertError> {
        Ok(Value::Float(x))
    }

    fn serialize_char(self, c: char) -> Result<Value, ConvertError> {
        Ok(Value::Text(c.to_string()))
    }

    fn serialize_str(self, text: &str) -> Result<Value, ConvertError> {
        Ok(Value::from(text))
    }

    fn serialize_bytes(self, bytes: &[u8]) -> Result<Value, ConvertError> {
        Ok(Value::from(bytes))
    }

    fn serialize_none(self) -> Result<Value, ConvertError> {
        Ok(Value::Null)
    }

    fn serialize_some<T: Serialize + ?Sized>(self, data: &T) -> Result<Value, ConvertError> {
        to_value(data)
    }

    fn serialize_unit(self) -> Result<Value, ConvertError> {
        Ok(Value::Null)
    }

    fn serialize_unit_struct(self, _: &'static str) -> Result<Value, ConvertError> {
        Ok(Value::Null)
    }

    fn serialize_unit_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
    ) -> Result<Value, ConvertError> {
        Ok(Value::from(variant))
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        data: &T,
    ) -> Result<Value, ConvertError> {
        to_value(data)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        data: &T,
    ) -> Result<Value, ConvertError> {
        Ok(in_variant(Some(variant), to_value(data)?))
    }

    fn serialize_seq(self, _: Option<usize>) -> Result<Elements, ConvertError> {
        Ok(Elements::new(None))
    }

    fn serialize_tuple(self, _: usize) -> Result<Elements, ConvertError> {
        Ok(Elements::new(None))
    }

    fn serialize_tuple_struct(self, _: &'static str, _: usize) -> Result<Elements, ConvertError> {
        Ok(Elements::new(None))
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<Elements, ConvertError> {
        Ok(Elements::new(Some(variant)))
    }

    fn serialize_map(self, _: Option<usize>) -> Result<Entries, ConvertError> {
        Ok(Entries::new(None))
    }

    fn serialize_struct(self, _: &'static str, _: usize) -> Result<Entries, ConvertError> {
        Ok(Entries::new(None))
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<Entries, ConvertError> {
        Ok(Entries::new(Some(variant)))
    }
}

macro_rules! elements {
    ($($in:ident :: $method:ident),*) => {$(
        impl $in for Elements {
            type Ok = Value;
            type Error = ConvertError;

            fn $method<T: Serialize + ?Sized>(&mut self, data: &T) -> Result<(), ConvertError> {
                self.push(data)
            }

            fn end(self) -> Result<Value, ConvertError> {
                Ok(self.finish())
            }
        }
    )*};
}

elements!(
    SerializeSeq::serialize_element,
    SerializeTuple::serialize_element,
    SerializeTupleStruct::serialize_field,
    SerializeTupleVariant::serialize_field
);

macro_rules! members {
    ($($in:ident),*) => {$(
        impl $in for Entries {
            type Ok = Value;
            type Error = ConvertError;

            fn serialize_field<T: Serialize + ?Sized>(
                &mut self,
                key: &'static str,
                data: &T,
            ) -> Result<(), ConvertError> {
                self.push(Value::from(key), data)
            }

            fn end(self) -> Result<Value, ConvertError> {
                Ok(self.finish())
            }
        }
    )*};
}

members!(SerializeStruct, SerializeStructVariant);

impl SerializeMap for Entries {
    type Ok = Value;
    type Error = ConvertError;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), ConvertError> {
        self.key = Some(to_value(key)?);
        Ok(())
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, data: &T) -> Result<(), ConvertError> {
        match self.key.take() {
            Some(key) => self.push(key, data),
            None => Err(ConvertError::new(&"a map value without its key")),
        }
    }

    fn end(self) -> Result<Value, ConvertError> {
        Ok(self.finish())
    }
}
