//! Allow-list of the globals (module and name) that a pickle of weights may refer to. Invariant: no global is ever
//! called; each allowed name maps to a [`Global`], and every other name is an error.

use super::FileDType;

/// The meaning of an allowed global.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Global {
    /// `collections.OrderedDict`: a dict.
    OrderedDict,
    /// `torch._utils._rebuild_tensor{,_v2}`: (storage, offset, shape, stride, ...).
    RebuildTensor,
    /// `torch._utils._rebuild_parameter{,_with_state}`: (tensor, requires_grad, hooks, ...).
    RebuildParameter,
    /// `torch.FloatStorage` and similar classes, which state the element type in a persistent id.
    Storage(FileDType),
    /// `torch.Size`: (tuple).
    Size,
    /// `copyreg._reconstructor`: (class, object, None), an instance whose state follows.
    Reconstructor,
    /// `builtins.object`, the second argument of `_reconstructor`.
    Object,
    /// A constructor of plain data (`set`, `torch.device`); a call becomes a node with the constructor and its
    /// arguments.
    Data,
    /// A class; an instance becomes an inert node with the class and the state.
    Class,
    /// A constant (`torch.float32`).
    Constant,
}

/// Looks up a global by module and name; `None` if it is not allowed.
pub(super) fn lookup(module: &str, name: &str) -> Option<Global> {
    let found = match (module, name) {
        ("collections", "OrderedDict") => Global::OrderedDict,
        ("torch._utils", "_rebuild_tensor" | "_rebuild_tensor_v2") => Global::RebuildTensor,
        ("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state") => Global::RebuildParameter,
        ("torch", "Size") => Global::Size,
        ("torch", "device") => Global::Data,
        ("torch", name) => return storage(name).map(Global::Storage).or_else(|| constant(name)),
        ("copyreg" | "copy_reg", "_reconstructor") => Global::Reconstructor,
        ("builtins" | "__builtin__", "object") => Global::Object,
        ("builtins" | "__builtin__", "set" | "frozenset") => Global::Data,
        // fair-esm's `.pt` files contain their training arguments as a Namespace.
        ("argparse", "Namespace") => Global::Class,
        ("__main__", name) if is_identifier(name) => Global::Class,
        (module, name) if is_torch_layer(module) && is_identifier(name) => Global::Class,
        _ => return None,
    };
    Some(found)
}

/// Storage classes by name. Source: torch/storage.py, `_dtype_to_storage_type_map`.
fn storage(name: &str) -> Option<FileDType> {
    Some(match name {
        "DoubleStorage" => FileDType::F64,
        "FloatStorage" => FileDType::F32,
        "HalfStorage" => FileDType::F16,
        "BFloat16Storage" => FileDType::BF16,
        "LongStorage" => FileDType::I64,
        "IntStorage" => FileDType::I32,
        "ShortStorage" => FileDType::I16,
        "CharStorage" => FileDType::I8,
        "ByteStorage" => FileDType::U8,
        "BoolStorage" => FileDType::Bool,
        _ => return None,
    })
}

/// Looks up the constants for element types (`torch.float32`), which occur in configurations stored with the weights.
fn constant(name: &str) -> Option<Global> {
    let known = matches!(
        name,
        "float64"
            | "float32"
            | "float16"
            | "bfloat16"
            | "int64"
            | "int32"
            | "int16"
            | "int8"
            | "uint8"
            | "bool"
    );
    known.then_some(Global::Constant)
}

/// Returns whether `module` is `torch.nn.modules` or a submodule of it.
fn is_torch_layer(module: &str) -> bool {
    module.strip_prefix("torch.nn.modules").is_some_and(|rest| {
        rest.is_empty() || rest.strip_prefix('.').is_some_and(|parts| parts.split('.').all(is_identifier))
    })
}

/// Returns whether `name` is an ASCII identifier. A name with dots could refer to an attribute of another module.
fn is_identifier(name: &str) -> bool {
    !name.starts_with(|c: char| c.is_ascii_digit())
        && !name.is_empty()
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_listed_names_pass() {
        let check = |module, name, expected| assert_eq!(lookup(module, name), expected, "{module}.{name}");
        check("torch", "HalfStorage", Some(Global::Storage(FileDType::F16)));
        check("torch", "bfloat16", Some(Global::Constant));
        check("torch", "load", None);
        check("torch.nn.modules.linear", "Linear", Some(Global::Class));
        check("torch.nn.modules", "Linear", Some(Global::Class));
        check("torch.nn.modules.module", "os.system", None);
        check("torch.nn.modulesx", "Linear", None);
        check("__main__", "MLPClassifier", Some(Global::Class));
        check("__main__", "os.system", None);
        check("os", "system", None);
        check("posix", "system", None);
        check("builtins", "eval", None);
        check("builtins", "getattr", None);
        check("torch.storage", "_load_from_bytes", None);
    }
}
