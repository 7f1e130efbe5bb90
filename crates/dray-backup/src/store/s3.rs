//! An S3-compatible object store.
//!
//! Create-only is `If-None-Match: *`, which S3, MinIO, Ceph, R2 and others honour. A store that
//! does not is refused when a repository is made in it.

use super::{Object, Put, Store};
use crate::error::{Error, Kind, Result};
use futures_util::TryStreamExt;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path;
use object_store::{
    ClientOptions, GetOptions, ObjectStore, ObjectStoreExt, PutMode, PutOptions, RetryConfig,
};
use std::fmt;
use std::future::Future;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::runtime::Runtime;

/// Longest request: 16 MiB at a little over 1 Mbit/s.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(120);
/// No new attempt at a request after this.
const RETRY_TIMEOUT: Duration = Duration::from_secs(120);
const RETRIES: usize = 5;
/// Attempts at creating an object whose existence the store contradicts itself about.
const CREATE_ATTEMPTS: u32 = 5;

/// A bucket, or a part of one.
pub struct S3Store {
    store: AmazonS3,
    place: String,
    prefix: String,
    /// None only while it is dropped.
    runtime: Option<Runtime>,
}

impl S3Store {
    /// The store in `bucket` below `prefix`; everything else is in the environment.
    ///
    /// # Errors
    /// `Invalid` when the environment does not say enough.
    pub fn from_environment(bucket: &str, prefix: &str) -> Result<Self> {
        Self::new(AmazonS3Builder::from_env().with_bucket_name(bucket), bucket, prefix)
    }

    /// The same with an endpoint and credentials of its own.
    ///
    /// # Errors
    /// As there.
    pub fn with_endpoint(
        endpoint: &str,
        access_key: &str,
        secret_key: &str,
        bucket: &str,
        prefix: &str,
    ) -> Result<Self> {
        let builder = AmazonS3Builder::new()
            .with_endpoint(endpoint)
            .with_allow_http(endpoint.starts_with("http://"))
            .with_access_key_id(access_key)
            .with_secret_access_key(secret_key)
            .with_bucket_name(bucket);
        Self::new(builder, bucket, prefix)
    }

    fn new(builder: AmazonS3Builder, bucket: &str, prefix: &str) -> Result<Self> {
        let retry = RetryConfig {
            max_retries: RETRIES,
            retry_timeout: RETRY_TIMEOUT,
            ..Default::default()
        };
        let allow_http = builder
            .get_config_value(&object_store::aws::AmazonS3ConfigKey::Client(
                object_store::ClientConfigKey::AllowHttp,
            ))
            .is_some_and(|value| value == "true");
        let client = ClientOptions::new().with_timeout(REQUEST_TIMEOUT).with_allow_http(allow_http);
        let place = format!("s3://{bucket}/{prefix}").trim_end_matches('/').to_owned();
        let store = builder
            .with_client_options(client)
            .with_retry(retry)
            .build()
            .map_err(|e| Error::invalid(format!("{place} cannot be used: {e}")))?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .map_err(|e| Error::unavailable("no threads for an object store", e))?;
        let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
        Ok(Self { store, place, prefix, runtime: Some(runtime) })
    }

    fn wait<T>(&self, future: impl Future<Output = T>) -> Result<T> {
        let gone = || Error::new(Kind::Unavailable, "the object store is being closed");
        Ok(self.runtime.as_ref().ok_or_else(gone)?.block_on(future))
    }

    fn path(&self, name: &str) -> Result<Path> {
        super::check_name(name)?;
        Path::parse(format!("{}{name}", self.prefix))
            .map_err(|e| Error::invalid(format!("{name} is no name for an object: {e}")))
    }

    fn failed(&self, what: &str, name: &str, error: object_store::Error) -> Error {
        match error {
            object_store::Error::NotFound { .. } => {
                Error::new(Kind::NotFound, format!("there is no {}/{name}", self.place))
            }
            e => Error::unavailable(format!("cannot {what} {}/{name}", self.place), e),
        }
    }

    fn read(&self, name: &str, range: Option<std::ops::Range<u64>>) -> Result<Vec<u8>> {
        let path = self.path(name)?;
        let options = GetOptions { range: range.map(Into::into), ..Default::default() };
        let read = async { self.store.get_opts(&path, options).await?.bytes().await };
        let bytes = self.wait(read)?.map_err(|e| self.failed("read", name, e))?;
        Ok(bytes.to_vec())
    }
}

impl Drop for S3Store {
    fn drop(&mut self) {
        // Also where threads must not wait.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl fmt::Debug for S3Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.place)
    }
}

impl Store for S3Store {
    fn put_new(&self, name: &str, bytes: &[u8]) -> Result<Put> {
        let path = self.path(name)?;
        let mut attempt = 0;
        loop {
            let options = PutOptions { mode: PutMode::Create, ..Default::default() };
            let put = self.store.put_opts(&path, bytes.to_vec().into(), options);
            match self.wait(put)? {
                Ok(_) => return Ok(Put::Created),
                Err(object_store::Error::AlreadyExists { .. }) => {}
                Err(e) => return Err(self.failed("write", name, e)),
            }
            // Also the answer while another creation is under way, which may yet fail: what is
            // said to exist must exist.
            if self.exists(name)? {
                return Ok(Put::Existed);
            }
            attempt += 1;
            if attempt == CREATE_ATTEMPTS {
                let text = format!("{}/{name} neither exists nor can be created", self.place);
                return Err(Error::new(Kind::Unavailable, text));
            }
            std::thread::sleep(Duration::from_millis(50 << attempt));
        }
    }

    fn get(&self, name: &str, limit: usize) -> Result<Vec<u8>> {
        // One byte more than allowed shows that there is more; what is not there is not sent.
        let bytes = self.read(name, Some(0..limit as u64 + 1)).or_else(|e| {
            // An empty object has no range at all.
            if e.kind() == Kind::Unavailable && self.is_empty(name)? {
                Ok(Vec::new())
            } else {
                Err(e)
            }
        })?;
        if bytes.len() > limit {
            return Err(Error::damaged(format!("{name} is longer than {limit} bytes")));
        }
        Ok(bytes)
    }

    fn get_range(&self, name: &str, offset: u64, len: usize) -> Result<Vec<u8>> {
        if len == 0 {
            return Ok(Vec::new());
        }
        let end = offset + len as u64;
        match self.read(name, Some(offset..end)) {
            Ok(bytes) if bytes.len() == len => Ok(bytes),
            Err(e) if e.kind() == Kind::NotFound => Err(e),
            other => {
                let path = self.path(name)?;
                let size = self.wait(self.store.head(&path))?;
                let size = size.map_err(|e| self.failed("read", name, e))?.size;
                match other {
                    _ if size < end => {
                        Err(Error::damaged(format!("{name} ends before byte {end}")))
                    }
                    Ok(_) => Err(Error::new(Kind::Unavailable, format!("{name} came in part"))),
                    Err(e) => Err(e),
                }
            }
        }
    }

    fn list(&self, prefix: &str) -> Result<Vec<Object>> {
        let folder = match prefix.strip_suffix('/') {
            Some(folder) => Some(self.path(folder)?),
            None if prefix.is_empty() => {
                let all = self.prefix.trim_end_matches('/');
                (!all.is_empty()).then(|| Path::from(all))
            }
            None => return Err(Error::invalid(format!("the prefix '{prefix}' ends in no /"))),
        };
        let all = self.store.list(folder.as_ref()).try_collect::<Vec<_>>();
        let all = self.wait(all)?.map_err(|e| self.failed("list", prefix, e))?;
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let object = |meta: object_store::ObjectMeta| {
            let name = meta.location.as_ref().strip_prefix(&self.prefix)?.to_owned();
            super::check_name(&name).ok()?;
            let created =
                Duration::from_millis(meta.last_modified.timestamp_millis().try_into().ok()?);
            Some(Object { name, bytes: meta.size, age: since.saturating_sub(created) })
        };
        Ok(all.into_iter().filter_map(object).collect())
    }

    fn delete(&self, name: &str) -> Result<()> {
        let path = self.path(name)?;
        match self.wait(self.store.delete(&path))? {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(e) => Err(self.failed("remove", name, e)),
        }
    }

    fn exists(&self, name: &str) -> Result<bool> {
        let path = self.path(name)?;
        match self.wait(self.store.head(&path))? {
            Ok(_) => Ok(true),
            Err(object_store::Error::NotFound { .. }) => Ok(false),
            Err(e) => Err(self.failed("look for", name, e)),
        }
    }
}

impl S3Store {
    fn is_empty(&self, name: &str) -> Result<bool> {
        let path = self.path(name)?;
        let meta = self.wait(self.store.head(&path))?;
        Ok(meta.map_err(|e| self.failed("read", name, e))?.size == 0)
    }
}
