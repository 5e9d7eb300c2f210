//! From values to Rust types, with serde's self-describing conventions.

use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, EnumAccess, Error as _, IntoDeserializer,
    MapAccess, SeqAccess, Unexpected, VariantAccess, Visitor,
};
use serde::forward_to_deserialize_any;

use super::{ConvertError, Value};

/// Reads a Rust type out of a value. Map members that are `undefined` are skipped, as if absent.
///
/// # Errors
/// [`ConvertError`] when the value has another shape than the type.
pub fn from_value<T: DeserializeOwned>(value: &Value) -> Result<T, ConvertError> {
    T::deserialize(value)
}

impl<'de> IntoDeserializer<'de, ConvertError> for &'de Value {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for &'de Value {
    type Error = ConvertError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ConvertError> {
        match self {
            Value::Uint(n) => visitor.visit_u64(*n),
            Value::Nint(n) => match self.as_i64() {
                Some(n) => visitor.visit_i64(n),
                None => visitor.visit_i128(-1 - i128::from(*n)),
            },
            Value::Bytes(bytes) => visitor.visit_borrowed_bytes(bytes),
            Value::Text(text) => visitor.visit_borrowed_str(text),
            Value::Array(elements) => visitor.visit_seq(Elements(elements.iter())),
            Value::Map(entries) => visitor.visit_map(Entries { rest: entries.iter(), value: None }),
            Value::Bool(b) => visitor.visit_bool(*b),
            Value::Null | Value::Undefined => visitor.visit_unit(),
            Value::Float(x) => visitor.visit_f64(*x),
            Value::Tag(..) => Err(ConvertError::invalid_type(Unexpected::Other("a tag"), &visitor)),
            Value::Simple(_) => {
                Err(ConvertError::invalid_type(Unexpected::Other("a simple value"), &visitor))
            }
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ConvertError> {
        match self {
            Value::Null | Value::Undefined => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, ConvertError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ConvertError> {
        let (name, content) = match self {
            Value::Text(_) => (self, None),
            Value::Map(entries) => match entries.as_slice() {
                [(name, content)] => (name, Some(content)),
                _ => return Err(ConvertError::invalid_length(entries.len(), &"one variant")),
            },
            _ => return Err(ConvertError::custom("an enum is a text or a map of one entry")),
        };
        visitor.visit_enum(Variant { name, content })
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(
        self,
        visitor: V,
    ) -> Result<V::Value, ConvertError> {
        visitor.visit_unit()
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct seq tuple tuple_struct map struct identifier
    }
}

struct Elements<'de>(std::slice::Iter<'de, Value>);

impl<'de> SeqAccess<'de> for Elements<'de> {
    type Error = ConvertError;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, ConvertError> {
        self.0.next().map(|element| seed.deserialize(element)).transpose()
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.0.len())
    }
}

struct Entries<'de> {
    rest: std::slice::Iter<'de, (Value, Value)>,
    value: Option<&'de Value>,
}

impl<'de> MapAccess<'de> for Entries<'de> {
    type Error = ConvertError;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, ConvertError> {
        let Some((key, value)) = self.rest.find(|(_, value)| *value != Value::Undefined) else {
            return Ok(None);
        };
        self.value = Some(value);
        seed.deserialize(key).map(Some)
    }

    fn next_value_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<T::Value, ConvertError> {
        match self.value.take() {
            Some(value) => seed.deserialize(value),
            None => Err(ConvertError::custom("a map value was asked for before its key")),
        }
    }
}

struct Variant<'de> {
    name: &'de Value,
    content: Option<&'de Value>,
}

impl<'de> EnumAccess<'de> for Variant<'de> {
    type Error = ConvertError;
    type Variant = Content<'de>;

    fn variant_seed<T: DeserializeSeed<'de>>(
        self,
        seed: T,
    ) -> Result<(T::Value, Content<'de>), ConvertError> {
        Ok((seed.deserialize(self.name)?, Content(self.content)))
    }
}

struct Content<'de>(Option<&'de Value>);

impl<'de> Content<'de> {
    fn required(self) -> Result<&'de Value, ConvertError> {
        self.0.ok_or_else(|| ConvertError::custom("a variant without its content"))
    }
}

impl<'de> VariantAccess<'de> for Content<'de> {
    type Error = ConvertError;

    fn unit_variant(self) -> Result<(), ConvertError> {
        match self.0 {
            None | Some(Value::Null) => Ok(()),
            Some(_) => Err(ConvertError::custom("a unit variant with content")),
        }
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(
        self,
        seed: T,
    ) -> Result<T::Value, ConvertError> {
        seed.deserialize(self.required()?)
    }

    fn tuple_variant<V: Visitor<'de>>(
        self,
        _: usize,
        visitor: V,
    ) -> Result<V::Value, ConvertError> {
        self.required()?.deserialize_any(visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ConvertError> {
        self.required()?.deserialize_any(visitor)
    }
}
