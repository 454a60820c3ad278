"""Hardening of NVFlare kits: nothing stays in a kit that a federation does not need.

NVFlare's own kits are for sending code: a submitter may run code at every site, read files and get logs. Here every
file of a kit but keys and certificates is written anew, in one form, whatever made the kit: rights are listed
explicitly, a job can name one class of ours and no other, a job's files are validated before any process starts, and
nothing is stored outside the organisation's folder.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from pbmvfl._files import PRIVATE_FILE, PRIVATE_FOLDER, make_private_folder, write_atomically
from pbmvfl.deploy.nvflare.job import PARTY_CLASS, SERVER_CLASS
from pbmvfl.deploy.site.federation_file import LARGEST_NUM_PARTIES
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.errors import FederationError

VALIDATOR = "pbmvfl.deploy.nvflare.validator.JobValidator"
LAUNCHERS = "pbmvfl.deploy.nvflare.launcher"
READINESS = "pbmvfl.deploy.nvflare.readiness.Readiness"
_NVFLARE = "nvflare.app_common"

#: Seconds between a site's signs of life. NVFlare's 10 would let a dead job look alive for as long.
HEARTBEAT = 2
#: Seconds that the server waits for a party's final report on a finished job. NVFlare's 900 are for results.
OUTCOME_WAIT = 10
#: Seconds beyond the link's patience after which a silent site is no longer listed.
_SILENCE = 60
#: Largest size that a peer may announce, which is allocated before the first byte comes. A job has fewer.
LARGEST_BLOB = 32 << 20
_LOG_BYTES, _LOG_FILES = 2_000_000, 3

_NOTHING = dict.fromkeys(
    (
        "submit_job",
        "clone_job",
        "manage_job",
        "download_job",
        "operate",
        "app_command",
        "byoc",
        "shell_commands",
        "server-predeployed-flwr",
        "view",
    ),
    "none",
)
_LEADS = {
    "submit_job": "any",
    "clone_job": "n:submitter",
    "manage_job": "n:submitter",
    "app_command": "any",
    "view": "any",
}
#: All rights, for every role that a certificate can have.
AUTHORIZATION: dict[str, Any] = {
    "format_version": "1.0",
    "permissions": {
        "lead": {**_NOTHING, **_LEADS},
        "project_admin": _NOTHING,
        "org_admin": _NOTHING,
        "member": _NOTHING,
    },
}

#: Only the server is dialled, and a site's own processes use mutual TLS with the site's certificate, so that another
#: user of the same machine cannot connect to them.
COMMUNICATION: dict[str, Any] = {
    "allow_adhoc_conns": False,
    "streaming_max_blob_size": LARGEST_BLOB,
    "internal": {"scheme": "tcp", "resources": {"host": "localhost", "connection_security": "mtls"}},
}


def harden(site_folder: SiteFolder) -> None:
    """Write every file of an organisation's kit but keys and certificates; also of the lead's kit, if there is one."""
    kits = {site_folder.kit: _files(site_folder)}
    if site_folder.is_server and site_folder.lead_kit.is_dir():
        kits[site_folder.lead_kit] = _lead_files(site_folder)
    make_private_folder(site_folder.path / "state")
    for kit, files in kits.items():
        role = site_folder.certificate.stem if kit == site_folder.kit else "client"
        keys = {kit / "startup" / name for name in ("rootCA.pem", f"{role}.crt", f"{role}.key")}
        for part in (kit / "startup", kit / "local"):
            make_private_folder(part)
            for stray in set(part.iterdir()) - keys:
                _remove(stray)
        for name, said in files.items():
            write_atomically(kit / name, json.dumps(said, indent=1) + "\n", mode=PRIVATE_FILE)
    _remove(site_folder.kit / "transfer")
    if site_folder.lead_kit in kits:
        make_private_folder(site_folder.lead_kit / "transfer")
    for folder in (*kits, site_folder.path / "state"):
        close_to_others(folder)


def check(site_folder: SiteFolder) -> None:
    """Refuse a kit with a file more than `harden` leaves, which can change what a site accepts, or without its keys."""
    kit = site_folder.kit
    keys = {site_folder.certificate, site_folder.private_key, site_folder.authority}
    permitted = keys | {kit / name for name in _files(site_folder)}
    for folder in (kit / "startup", kit / "local"):
        found = set(folder.iterdir()) if folder.is_dir() else set()
        if more := sorted(each.name for each in found - permitted):
            raise FederationError(f"{folder} has files that no kit has: {', '.join(more)}; take them away")
    if missing := sorted(each.name for each in keys if not each.is_file()):
        raise FederationError(f"{kit / 'startup'} lacks {', '.join(missing)}; make it with `pbmvfl federation package`")


def _files(site_folder: SiteFolder) -> dict[str, dict[str, Any]]:
    """Return the files of a site's kit.

    NVFlare looks for some of them by their bare names in the whole kit, folders of jobs included, and takes the first
    that it finds: what lies in the kit's root is found before anything that a job brought.
    """
    startup_name = "fed_server.json" if site_folder.is_server else "fed_client.json"
    rules, startup = resources(site_folder), startup_file(site_folder)
    return {
        f"startup/{startup_name}": startup,
        startup_name: startup,
        "local/resources.json": rules,
        "resources.json": rules,
        "local/authorization.json": AUTHORIZATION,
        "local/log_config.json": log_config(),
        "comm_config.json": COMMUNICATION,
    }


def startup_file(site_folder: SiteFolder) -> dict[str, Any]:
    """Return the startup file: this site's identity and the server's address; jobs must be signed."""
    federation = site_folder.federation
    ours = {
        "ssl_private_key": site_folder.private_key.name,
        "ssl_cert": site_folder.certificate.name,
        "ssl_root_cert": "rootCA.pem",
    }
    service = {"target": f"{federation.host}:{federation.port}", "scheme": "tcp"}
    if site_folder.is_server:
        server = {
            "name": federation.name,
            # It listens at every address of the machine; the name is the one in its certificate.
            "service": {**service, "target": f"{federation.server}:{federation.port}"},
            "admin_server": federation.server,
            "admin_port": federation.port,
            **ours,
            "connection_security": "mtls",
        }
        return {"format_version": 2, "require_signed_jobs": True, "servers": [server]}
    return {
        "format_version": 2,
        "require_signed_jobs": True,
        "servers": [{"name": federation.name, "service": service, "identity": federation.server}],
        "client": {**ours, "fqsn": site_folder.name, "is_leaf": True, "connection_security": "mtls"},
    }


def resources(site_folder: SiteFolder) -> dict[str, Any]:
    """Return the components of a site's process, and what it accepts from jobs."""
    common = {
        "format_version": 2,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": [SERVER_CLASS if site_folder.is_server else PARTY_CLASS],
        "app_validator": {"path": VALIDATOR, "args": {}},
    }
    ready = _component("readiness", READINESS)
    if not site_folder.is_server:
        manager = f"{_NVFLARE}.resource_managers.gpu_resource_manager.GPUResourceManager"
        consumer = f"{_NVFLARE}.resource_consumers.gpu_resource_consumer.GPUResourceConsumer"
        return {
            **common,
            "allow_log_streaming": False,
            # Without it NVFlare sends most of this very file to the server.
            "client": {"retry_timeout": 30, "site_config": {}},
            "components": [
                _component("resource_manager", manager, num_of_gpus=0, mem_per_gpu_in_GiB=0, expiration_period=30),
                _component("resource_consumer", consumer),
                _component("process_launcher", f"{LAUNCHERS}.PartyLauncher"),
                ready,
            ],
        }
    storage, state = f"{_NVFLARE}.storages.filesystem_storage.FilesystemStorage", site_folder.path / "state"
    snapshots = {"path": storage, "args": {"root_dir": str(state / "snapshots"), "uri_root": "/"}}
    return {
        **common,
        "servers": [
            {
                "admin_storage": "transfer",
                "max_num_clients": LARGEST_NUM_PARTIES,
                "heart_beat_timeout": site_folder.federation.patience + _SILENCE,
                "download_job_url": "http://localhost/",
                "admin_timeout": 10.0,
            }
        ],
        "snapshot_persistor": {
            "path": f"{_NVFLARE}.state_persistors.storage_state_persistor.StorageStatePersistor",
            "args": {"uri_root": "/", "storage": snapshots},
        },
        "components": [
            _component(
                "job_scheduler",
                f"{_NVFLARE}.job_schedulers.job_scheduler.DefaultJobScheduler",
                # One run at a time: two would use the same rows of the same parties.
                max_jobs=1,
                min_schedule_interval=1.0,
                max_schedule_interval=5.0,
                # A job waits for a missing site as long as the link would.
                max_schedule_count=max(10, int(site_folder.federation.patience // 3)),
            ),
            _component(
                "job_manager",
                "nvflare.apis.impl.job_def_manager.SimpleJobDefManager",
                uri_root=str(state / "jobs"),
                job_store_id="job_store",
            ),
            _component("job_store", storage),
            _component("process_launcher", f"{LAUNCHERS}.ServerLauncher"),
            ready,
        ],
    }


def _component(id: str, path: str, **args: Any) -> dict[str, Any]:
    return {"id": id, "path": path, "args": args}


def log_config() -> dict[str, Any]:
    """Return the log configuration: warnings and errors, in bounded files of this organisation."""
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"

    def file(name: str, level: str) -> dict[str, Any]:
        return {
            "class": "logging.handlers.RotatingFileHandler",
            "level": level,
            "formatter": "plain",
            "filename": name,
            "mode": "a",
            "maxBytes": _LOG_BYTES,
            "backupCount": _LOG_FILES,
            "delay": True,
        }

    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"format": form}},
        "handlers": {"log": file("log.txt", "DEBUG"), "errors": file("error_log.txt", "ERROR")},
        "loggers": {"root": {"level": "WARNING", "handlers": ["log", "errors"]}},
    }


def close_to_others(folder: Path) -> None:
    """Remove all permissions of other users."""
    for here, _, files in os.walk(folder):
        os.chmod(here, PRIVATE_FOLDER)
        for path in (Path(here) / name for name in files):
            if not path.is_symlink() and path.is_file():
                path.chmod(PRIVATE_FILE)


def _lead_files(site_folder: SiteFolder) -> dict[str, dict[str, Any]]:
    """Return the files of the submitter's kit: it dials the server, and keeps downloads inside its own folder."""
    federation = site_folder.federation
    admin = {
        "project_name": federation.name,
        "username": federation.lead,
        "server_identity": federation.server,
        "scheme": "tcp",
        "host": federation.host,
        "port": federation.port,
        "connection_security": "mtls",
        "uid_source": "user_input",
        "with_file_transfer": True,
        "upload_dir": "transfer",
        "download_dir": "transfer",
        "client_key": "client.key",
        "client_cert": "client.crt",
        "ca_cert": "rootCA.pem",
    }
    waits = {"idle_timeout": 900.0, "login_timeout": 10.0, "with_debug": False, "authenticate_msg_timeout": 2.0}
    return {
        "startup/fed_admin.json": {"format_version": 1, "admin": admin},
        "local/resources.json": {"format_version": 1, "admin": {**waits, "prompt": "> "}},
        "comm_config.json": {"allow_adhoc_conns": False, "streaming_max_blob_size": LARGEST_BLOB},
    }


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
