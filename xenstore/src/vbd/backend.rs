//! What the toolstack says about a device, in the backend directory.

use super::{BackendPath, KeyError, ReadError, decimal};
use crate::client::{Client, Tx};

/// The backend directory, as far as a backend needs it. Written by the toolstack; trusted, but parsed
/// as strictly as everything else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackendKeys {
    /// Absolute path of the frontend's directory.
    pub frontend: String,
    /// `params`: what to open, `None` while it is missing or empty (an ejected CD).
    pub params: Option<String>,
    /// `mode` without a `w`: no operation may modify the disk.
    pub readonly: bool,
    /// `discard-enable`, 1 unless it says 0.
    pub discard_enable: bool,
    /// `device-type` is `cdrom`.
    pub cdrom: bool,
    /// `removable` is 1.
    pub removable: bool,
    /// `script`: what the toolstack runs to set the disk up, its file name only.
    pub script: Option<String>,
    /// `hotplug-status`: what the script has said; `connected` when it is done.
    pub hotplug_status: Option<String>,
    /// `hotplug-error`: why the script, or we, could not set the disk up.
    pub hotplug_error: Option<String>,
    /// `physical-device`: the block device a script has set up, major and minor.
    pub physical_device: Option<(u32, u32)>,
    /// `physical-device-path`: where that device, or a plain file, is.
    pub physical_device_path: Option<String>,
}

const KEYS: [&str; 12] = [
    "frontend",
    "frontend-id",
    "params",
    "mode",
    "discard-enable",
    "device-type",
    "removable",
    "script",
    "hotplug-status",
    "hotplug-error",
    "physical-device",
    "physical-device-path",
];

/// Reads the backend directory, each key once.
pub async fn read_backend(
    client: &Client,
    tx: Tx,
    path: &BackendPath,
) -> Result<BackendKeys, ReadError> {
    let paths = KEYS.map(|key| path.key(key));
    let values = client.read_many(tx, &paths).await?;
    // read_many answers one value for each path.
    let values = <[_; KEYS.len()]>::try_from(values)
        .map_err(|_| crate::Error::Malformed("as many values as keys expected"))?;
    Ok(parse(path.domid, values)?)
}

fn parse(domid: u16, values: [Option<Vec<u8>>; KEYS.len()]) -> Result<BackendKeys, KeyError> {
    let [
        frontend,
        frontend_id,
        params,
        mode,
        discard,
        device_type,
        removable,
        script,
        hotplug_status,
        hotplug_error,
        physical_device,
        physical_device_path,
    ] = values.map(|value| value.filter(|value| !value.is_empty()));
    let expected_id = Some(u32::from(domid));
    if frontend_id.as_deref().and_then(decimal) != expected_id {
        let expected = format!("{domid}, as in the directory's path");
        return Err(KeyError::new(
            "frontend-id",
            frontend_id.as_deref(),
            expected,
        ));
    }
    let frontend = text("frontend", frontend)?
        .ok_or_else(|| KeyError::new("frontend", None, "an absolute path"))?;
    if !frontend.starts_with('/') || frontend.contains('\0') {
        return Err(KeyError::new(
            "frontend",
            Some(frontend.as_bytes()),
            "an absolute path",
        ));
    }
    let mode = mode.ok_or_else(|| KeyError::new("mode", None, "r or w"))?;
    Ok(BackendKeys {
        frontend,
        params: text("params", params)?,
        readonly: !mode.contains(&b'w'),
        discard_enable: flag("discard-enable", discard.as_deref(), true)?,
        cdrom: device_type.as_deref() == Some(b"cdrom"),
        removable: flag("removable", removable.as_deref(), false)?,
        script: text("script", script)?.map(file_name),
        hotplug_status: text("hotplug-status", hotplug_status)?,
        // Only shown: what isn't text is no reason to refuse the disk.
        hotplug_error: hotplug_error.map(|value| String::from_utf8_lossy(&value).into_owned()),
        physical_device: physical_device
            .map(|value| {
                device_number(&value).ok_or_else(|| {
                    let expected = "major:minor in hexadecimal";
                    KeyError::new("physical-device", Some(&value), expected)
                })
            })
            .transpose()?,
        physical_device_path: text("physical-device-path", physical_device_path)?,
    })
}

/// libxl writes the whole path, others may not.
fn file_name(path: String) -> String {
    match path.rsplit_once('/') {
        Some((_, name)) => name.to_owned(),
        None => path,
    }
}

/// `major:minor`, each of 1 to 8 hexadecimal digits, as the hotplug scripts take them from stat(1).
fn device_number(value: &[u8]) -> Option<(u32, u32)> {
    let (major, minor) = str::from_utf8(value).ok()?.split_once(':')?;
    let number = |digits: &str| {
        let hexadecimal = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        u32::from_str_radix(digits, 16).ok().filter(|_| hexadecimal)
    };
    Some((number(major)?, number(minor)?))
}

fn text(key: &str, value: Option<Vec<u8>>) -> Result<Option<String>, KeyError> {
    value
        .map(|value| {
            String::from_utf8(value)
                .map_err(|error| KeyError::new(key, Some(error.as_bytes()), "UTF-8 text"))
        })
        .transpose()
}

fn flag(key: &str, value: Option<&[u8]>, default: bool) -> Result<bool, KeyError> {
    match value {
        None => Ok(default),
        Some(b"0") => Ok(false),
        Some(b"1") => Ok(true),
        Some(other) => Err(KeyError::new(key, Some(other), "0 or 1")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(changes: &[(&str, &str)]) -> Result<BackendKeys, String> {
        let libxl = [
            "/local/domain/1/device/vbd/51712",
            "1",
            "/dev/vdd",
            "w",
            "1",
            "disk",
            "0",
            "/etc/xen/scripts/block",
            "connected",
            "",
            "fe:0",
            "/dev/vdd",
        ];
        let mut values = libxl.map(|value| Some(value.as_bytes().to_vec()));
        for (key, value) in changes {
            let index = KEYS.iter().position(|known| known == key).unwrap();
            values[index] = (*value != "-").then(|| value.as_bytes().to_vec());
        }
        parse(1, values).map_err(|error| error.to_string())
    }

    #[test]
    fn what_libxl_writes() {
        let keys = BackendKeys {
            frontend: "/local/domain/1/device/vbd/51712".to_owned(),
            params: Some("/dev/vdd".to_owned()),
            readonly: false,
            discard_enable: true,
            cdrom: false,
            removable: false,
            script: Some("block".to_owned()),
            hotplug_status: Some("connected".to_owned()),
            hotplug_error: None,
            physical_device: Some((0xfe, 0)),
            physical_device_path: Some("/dev/vdd".to_owned()),
        };
        assert_eq!(parsed(&[]), Ok(keys.clone()));
        assert_eq!(
            parsed(&[("discard-enable", "-"), ("removable", "")]),
            Ok(keys)
        );
        let cd = parsed(&[("params", ""), ("mode", "r"), ("device-type", "cdrom")]).unwrap();
        assert_eq!((cd.params, cd.readonly, cd.cdrom), (None, true, true));
        let fresh = ["hotplug-status", "physical-device", "physical-device-path"];
        let fresh = parsed(&fresh.map(|key| (key, "-"))).unwrap();
        assert_eq!((fresh.hotplug_status, fresh.physical_device), (None, None));
        let script = |path| parsed(&[("script", path)]).unwrap().script;
        assert_eq!(script("block-xenblkd").as_deref(), Some("block-xenblkd"));
        assert_eq!(script("-"), None);
        assert!(
            !parsed(&[("mode", "w!"), ("discard-enable", "0")])
                .unwrap()
                .readonly
        );
    }

    #[test]
    fn what_no_toolstack_writes() {
        for (key, value, message) in [
            (
                "frontend-id",
                "2",
                "frontend-id is \"2\", expected 1, as in the directory's path",
            ),
            (
                "frontend",
                "device/vbd/1",
                "frontend is \"device/vbd/1\", expected an absolute path",
            ),
            (
                "frontend",
                "-",
                "frontend is missing, expected an absolute path",
            ),
            ("mode", "-", "mode is missing, expected r or w"),
            (
                "discard-enable",
                "yes",
                "discard-enable is \"yes\", expected 0 or 1",
            ),
            (
                "physical-device",
                "fe:+1",
                "physical-device is \"fe:+1\", expected major:minor in hexadecimal",
            ),
            (
                "physical-device",
                "fe00",
                "physical-device is \"fe00\", expected major:minor in hexadecimal",
            ),
        ] {
            assert_eq!(parsed(&[(key, value)]), Err(message.to_owned()));
        }
    }
}
