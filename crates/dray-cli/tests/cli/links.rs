//! Links between the documents lead to files and headings that are there.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace")
}

/// The documents: those at the top, and what lies below `docs`.
fn documents() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![(root(), false), (root().join("docs"), true)];
    while let Some((folder, deep)) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("a folder") {
            let path = entry.expect("entry").path();
            if path.extension().is_some_and(|extension| extension == "md") {
                found.push(path);
            } else if deep && path.is_dir() {
                folders.push((path, true));
            }
        }
    }
    found
}

/// The text without its blocks of code.
fn prose(path: &Path) -> String {
    let text = std::fs::read_to_string(path).expect("text");
    text.split("```").step_by(2).collect()
}

/// What a link to a heading says, as GitHub makes it of its text.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || "-_ ".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

fn anchors(path: &Path) -> BTreeSet<String> {
    let text = prose(path);
    let headings = text.lines().filter(|line| line.starts_with('#'));
    headings.map(|line| anchor(line.trim_start_matches('#'))).collect()
}

/// Where the links of a text lead.
fn links(text: &str) -> Vec<&str> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    targets.map(|(target, _)| target).filter(|target| !target.contains("://")).collect()
}

/// A path without `..`, whether anything is there or not.
fn normal(path: &Path) -> PathBuf {
    path.components().fold(PathBuf::new(), |mut all, one| {
        match one {
            Component::ParentDir => drop(all.pop()),
            one => all.push(one),
        }
        all
    })
}

#[test]
fn every_link_leads_somewhere() {
    let (mut broken, mut count) = (Vec::new(), 0);
    for document in documents() {
        for link in links(&prose(&document)) {
            count += 1;
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let folder = document.parent().expect("a folder");
            let target = match file {
                "" => document.clone(),
                file => normal(&folder.join(file)),
            };
            let is_there =
                target.exists() && (heading.is_empty() || anchors(&target).contains(heading));
            if !is_there {
                broken.push(format!("{}: {link}", document.display()));
            }
        }
    }
    assert!(count > 100, "{count} links in all documents");
    assert!(broken.is_empty(), "{broken:#?}");
}
