//! An S3-compatible object store.
//!
//! Create-only is `If-None-Match: *`, which S3, MinIO, Ceph, R2 and others honour. A store that
//! does not is refused when a repository is made in it.

use super::access::{Credentials, S3Access};
use super::{Object, Put, Store};
use crate::error::{Error, Kind, Result};
use futures_util::TryStreamExt;
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey, AwsCredential};
use object_store::path::Path;
use object_store::{
    ClientConfigKey, ClientOptions, GetOptions, ObjectStore, ObjectStoreExt, PutMode, PutOptions,
    RetryConfig, StaticCredentialProvider,
};
use std::fmt;
use std::future::Future;
use std::sync::Arc;
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

/// Who asks, and where that is from, when no file of credentials is named. Without any of these the
/// library would ask a cloud's metadata service, which elsewhere nobody answers for minutes.
const IDENTITIES: [AmazonS3ConfigKey; 6] = [
    AmazonS3ConfigKey::AccessKeyId,
    AmazonS3ConfigKey::WebIdentityTokenFile,
    AmazonS3ConfigKey::ContainerCredentialsRelativeUri,
    AmazonS3ConfigKey::ContainerCredentialsFullUri,
    AmazonS3ConfigKey::MetadataEndpoint,
    AmazonS3ConfigKey::SkipSignature,
];
/// Where the environment allows an endpoint without TLS.
const ALLOW_HTTP: AmazonS3ConfigKey = AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp);

impl S3Store {
    /// The store in `bucket` below `prefix`; what `access` does not say is in the environment.
    /// Nothing is asked of it yet.
    ///
    /// # Errors
    /// `Invalid` when the two do not say enough.
    pub fn open(bucket: &str, prefix: &str, access: &S3Access) -> Result<Self> {
        let place = format!("s3://{bucket}/{prefix}").trim_end_matches('/').to_owned();
        let unusable = |why: String| Error::invalid(format!("{place} cannot be used: {why}"));
        let builder = described(AmazonS3Builder::from_env(), access)
            .map_err(|why| unusable(why.to_string()))?;
        let store =
            builder.with_bucket_name(bucket).build().map_err(|why| unusable(why.to_string()))?;
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
            object_store::Error::PermissionDenied { .. }
            | object_store::Error::Unauthenticated { .. } => {
                let text = format!("cannot {what} {}/{name}: the store refuses", self.place);
                Error::new(Kind::Denied, text)
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

/// The environment's settings with what is configured before them.
fn described(mut builder: AmazonS3Builder, access: &S3Access) -> Result<AmazonS3Builder> {
    access.check_endpoint()?;
    if let Some(endpoint) = &access.endpoint {
        // Goes before whatever the environment names.
        builder = builder.with_config(AmazonS3ConfigKey::S3Endpoint, endpoint);
    }
    if let Some(region) = &access.region {
        builder = builder.with_region(region);
    }
    if let Some(path) = &access.credentials_file {
        let Credentials { access_key_id: key_id, secret_access_key: secret_key, session_token } =
            Credentials::from_file(path)?;
        let credential = AwsCredential { key_id, secret_key, token: session_token };
        builder = builder.with_credentials(Arc::new(StaticCredentialProvider::new(credential)));
    } else if IDENTITIES.iter().all(|key| builder.get_config_value(key).is_none()) {
        return Err(Error::invalid(
            "there are no credentials: name a credentials_file, or give the agent \
             AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        ));
    }
    let by_environment = builder.get_config_value(&ALLOW_HTTP).is_some_and(|value| value == "true");
    let client = ClientOptions::new()
        .with_timeout(REQUEST_TIMEOUT)
        .with_allow_http(access.allow_http || by_environment);
    let retry =
        RetryConfig { max_retries: RETRIES, retry_timeout: RETRY_TIMEOUT, ..Default::default() };
    Ok(builder.with_client_options(client).with_retry(retry))
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
                    Ok(_) => {
                        Err(Error::new(Kind::Unavailable, format!("{name} arrived incomplete")))
                    }
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
