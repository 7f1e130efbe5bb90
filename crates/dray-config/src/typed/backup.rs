//! What was typed of backups: repositories that this host uses, and the store that it offers.

use super::{Reader, Text};
use crate::{BackupPlace, BackupStore};
use dray_backup::{Location, S3Access};
use serde::Deserialize;
use std::collections::HashSet;
use std::time::Duration;
use toml::Spanned;

/// How long what a peer has deleted stays, unless more is said: long enough that somebody notices.
const KEEP_DELETED: Duration = Duration::from_secs(14 * 86_400);
/// Most objects of one peer unless more is said: packs of some ten terabytes.
const MAX_OBJECTS: u64 = 1_000_000;
/// Longest time between two backups, in seconds: a year.
const MAX_INTERVAL: u64 = 365 * 86_400;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TypedStore {
    path: Text,
    append_only: Option<bool>,
    keep_deleted: Option<Text>,
    quota: Option<Text>,
    max_objects: Option<Spanned<u64>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TypedBackup {
    name: Text,
    url: Text,
    endpoint: Option<Text>,
    region: Option<Text>,
    credentials_file: Option<Text>,
    allow_http: Option<Spanned<bool>>,
    key_file: Option<Text>,
    every: Option<Text>,
    #[serde(default)]
    images: Vec<Text>,
    keep_last: Option<Spanned<u64>>,
}

impl Reader<'_> {
    pub(super) fn backup_store(&mut self, typed: Option<&TypedStore>) -> Option<BackupStore> {
        let typed = typed?;
        // A store with a mistake is not offered: a limit that was mistyped would be none.
        self.part(|reader| {
            let keep = typed.keep_deleted.as_ref();
            let keep = keep.and_then(|text| reader.interval("backup_store.keep_deleted", text));
            let quota = typed.quota.as_ref();
            let most = typed.max_objects.as_ref();
            let most = most
                .and_then(|most| reader.number("backup_store.max_objects", most, u32::MAX.into()));
            BackupStore {
                path: reader.path("backup_store.path", &typed.path),
                append_only: typed.append_only.unwrap_or(false),
                keep_deleted: keep.unwrap_or(KEEP_DELETED),
                quota: quota.and_then(|text| reader.size("backup_store.quota", text)),
                max_objects: most.unwrap_or(MAX_OBJECTS),
            }
        })
    }

    pub(super) fn backups(&mut self, typed: &[TypedBackup]) -> Vec<BackupPlace> {
        let mut seen = HashSet::new();
        let places = typed.iter().map(|place| self.part(|reader| reader.place(&mut seen, place)));
        places.collect::<Vec<_>>().into_iter().flatten().collect()
    }

    fn place(&mut self, seen: &mut HashSet<String>, place: &TypedBackup) -> BackupPlace {
        self.unique(seen, "backup.name", &place.name);
        if let Err(why) = dray_host::pool::check_name(place.name.get_ref()) {
            self.problem(&place.name, "backup.name", why.why, "use letters, digits, '-' and '_'");
        }
        let name = place.name.get_ref();
        let access = self.repository(place);
        let key = place.key_file.as_ref();
        let every = place.every.as_ref();
        if let Some(typed) = every.filter(|_| place.images.is_empty()) {
            let hint = "name them: images = [\"vm1-root\"]";
            self.problem(typed, &format!("backup.{name}.images"), "none is named", hint);
        }
        let keep_last = place.keep_last.as_ref().and_then(|typed| {
            self.number(&format!("backup.{name}.keep_last"), typed, u32::MAX.into())
        });
        BackupPlace {
            name: name.clone(),
            url: place.url.get_ref().clone(),
            access,
            key_file: key.map(|file| self.path(&format!("backup.{name}.key_file"), file)),
            every: every.and_then(|typed| self.interval(&format!("backup.{name}.every"), typed)),
            images: place.images.iter().map(|image| image.get_ref().clone()).collect(),
            keep_last: keep_last.map(|number| number as u32),
        }
    }

    /// How a repository is reached, with whatever is wrong with its URL.
    fn repository(&mut self, typed: &TypedBackup) -> S3Access {
        let field = |what: &str| format!("backup.{}.{what}", typed.name.get_ref());
        let url = typed.url.get_ref();
        let hint = "write it as file:///srv/backup, s3://bucket/prefix or dray://hostb/folder";
        let location = match url.parse() {
            _ if !url.contains("://") => Err(format!("'{url}' is not a URL")),
            Ok(location) => Ok(location),
            Err(why) => Err(dray_backup::Error::to_string(&why)),
        };
        if let Err(what) = &location {
            self.problem(&typed.url, &field("url"), what, hint);
        }
        let text = |typed: &Option<Text>| typed.as_ref().map(|typed| typed.get_ref().clone());
        let file = typed.credentials_file.as_ref();
        let access = S3Access {
            endpoint: text(&typed.endpoint),
            region: text(&typed.region),
            credentials_file: file.map(|file| self.path(&field("credentials_file"), file)),
            allow_http: typed.allow_http.as_ref().is_some_and(|allow| *allow.get_ref()),
        };
        if let (Err(why), Some(endpoint)) = (access.check_endpoint(), &typed.endpoint) {
            let hint = "write https://, or allow_http = true if no one else can listen on this \
                        network";
            self.problem(endpoint, &field("endpoint"), why.to_string(), hint);
        }
        let is_bucket = matches!(location, Ok(Location::S3 { .. }));
        if location.is_ok() && !is_bucket && access != S3Access::default() {
            let what = "endpoint, region, credentials_file and allow_http are for s3:// only";
            self.problem(&typed.url, &field("url"), what, "take them out");
        }
        access
    }

    /// A time like `24h`, `30m` or `7d`.
    fn interval(&mut self, field: &str, typed: &Text) -> Option<Duration> {
        let text = typed.get_ref();
        let unit = |text: &str| match text {
            "s" => Some(1),
            "m" => Some(60),
            "h" => Some(3600),
            "d" => Some(86_400),
            _ => None,
        };
        let parsed = text.char_indices().next_back().and_then(|(at, _)| {
            let (number, last) = text.split_at(at);
            number.parse::<u64>().ok()?.checked_mul(unit(last)?)
        });
        let found = parsed.filter(|seconds| (1..=MAX_INTERVAL).contains(seconds));
        if found.is_none() {
            let what = format!("'{text}' is not an interval");
            self.problem(typed, field, what, "write it as 24h, 30m or 7d, at most 365d");
        }
        found.map(Duration::from_secs)
    }
}
