//! Tests of model arguments: paths, hub ids and invalid names. Invariant: a test uses its own hub cache.

mod fetching;
mod server;

use std::fs;

use plimsoll_data::weights::{HubEnv, ModelPath, find_in_hub, resolve_model};

use super::{folder, message};

#[test]
fn hub_ids_are_found_in_the_cache() {
    let cache = folder("hub");
    let env = HubEnv { hub_cache: Some(cache.clone()), ..HubEnv::default() };
    let missing = |looked_at: &str| {
        format!(
            "model `org/name` is not in the Hugging Face cache (looked at `hub/{looked_at}`); \
             download it with `hf download org/name`, or copy its folder here and give the path"
        )
    };
    let check = |expected: &str| {
        let error = resolve_model("org/name", &env).expect_err("it is not complete");
        assert_eq!(message(&error), missing(expected));
    };
    let repository = cache.join("models--org--name");
    check("models--org--name");
    fs::create_dir_all(repository.join("refs")).expect("a folder can be made");
    check("models--org--name/refs/main");
    fs::write(repository.join("refs/main"), "../../../etc").expect("it writes");
    check("models--org--name/refs/main");
    fs::write(repository.join("refs/main"), "0a1b2c\n").expect("it writes");
    check("models--org--name/snapshots/0a1b2c");
    let snapshot = repository.join("snapshots/0a1b2c");
    fs::create_dir_all(&snapshot).expect("a folder can be made");
    let found = resolve_model("org/name", &env).expect("it is complete");
    assert_eq!(found, ModelPath::Folder(snapshot.clone()));
    assert_eq!(found.config(), snapshot.join("config.json"));
    assert_eq!(find_in_hub("org/name", &env).expect("it is there"), snapshot);
    let error = find_in_hub("org/name", &HubEnv::default()).expect_err("there is no cache");
    assert_eq!(
        message(&error),
        "model `org/name`: no Hugging Face cache is known, since neither HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME nor \
         HOME is set; set one, or give the model's folder"
    );
}

#[test]
fn existing_paths_win() {
    let folder = folder("paths");
    for name in ["config.json", "model.safetensors", "model.safetensors.index.json"] {
        fs::write(folder.join(name), "").expect("it writes");
    }
    let resolve = |name: &str| {
        let path = folder.join(name);
        (resolve_model(path.to_str().expect("a path"), &HubEnv::default()).expect("it exists"), path)
    };
    let (found, path) = resolve("");
    assert_eq!((found.weights(), &found), (Some(path.as_path()), &ModelPath::Folder(path.clone())));
    let (found, path) = resolve("config.json");
    assert_eq!((found.weights(), found.config()), (None, path));
    for name in ["model.safetensors", "model.safetensors.index.json"] {
        let (found, path) = resolve(name);
        assert_eq!((found.weights(), found.config()), (Some(path.as_path()), folder.join("config.json")));
    }
    let error = resolve_model("/no/such/folder", &HubEnv::default()).expect_err("it is neither");
    assert_eq!(message(&error), "there is no file or folder `/no/such/folder`; check the path");
}
