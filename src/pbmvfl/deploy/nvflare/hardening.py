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

#: Seconds between a site's signs of life. NVFlare's 10 would let a dead job look alive for as long.
HEARTBEAT = 2
#: Seconds that the server waits for a party's final report on a finished job. NVFlare's 900 are for results.
OUTCOME_WAIT = 10
#: Seconds beyond the link's patience after which a silent site is no longer listed.
_SILENCE = 60
#: Largest size that a peer may announce, which is allocated before the first byte comes. A job has fewer.
LARGEST_BLOB = 32 << 20
_LOG_BYTES, _LOG_FILES = 2_000_000, 3

_NOTHING = {
    "submit_job": "none",
    "clone_job": "none",
    "manage_job": "none",
    "download_job": "none",
    "operate": "none",
    "app_command": "none",
    "byoc": "none",
    "shell_commands": "none",
    "server-predeployed-flwr": "none",
}
#: All rights, for every role that a certificate can have.
AUTHORIZATION: dict[str, Any] = {
    "format_version": "1.0",
    "permissions": {
        "lead": {
            **_NOTHING,
            "submit_job": "any",
            "clone_job": "n:submitter",
            "manage_job": "n:submitter",
            "app_command": "any",
            "view": "any",
        },
        "project_admin": {**_NOTHING, "view": "none"},
        "org_admin": {**_NOTHING, "view": "none"},
        "member": {**_NOTHING, "view": "none"},
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
    startup, local = site_folder.kit / "startup", site_folder.kit / "local"
    for folder in (site_folder.kit, startup, local, site_folder.path / "state"):
        make_private_folder(folder)
    keep = {site_folder.certificate.name, site_folder.private_key.name, site_folder.authority.name}
    written = {
        startup: {_startup_name(site_folder): startup_file(site_folder)},
        local: {
            "resources.json": resources(site_folder),
            "authorization.json": AUTHORIZATION,
            "log_config.json": log_config(),
        },
        # NVFlare looks for these by their bare names in the whole kit, folders of jobs included, and takes the first
        # that it finds: what lies here is found before anything that a job brought.
        site_folder.kit: {
            "comm_config.json": COMMUNICATION,
            _startup_name(site_folder): startup_file(site_folder),
            "resources.json": resources(site_folder),
        },
    }
    _empty(startup, keep)
    _empty(local, set())
    for stray in ("readme.txt", "transfer"):
        _remove(site_folder.kit / stray)
    for folder, files in written.items():
        for name, said in files.items():
            write_atomically(folder / name, json.dumps(said, indent=1) + "\n", mode=PRIVATE_FILE)
    if site_folder.is_server and site_folder.lead_kit.is_dir():
        _harden_lead(site_folder)
    for folder in (site_folder.kit, site_folder.lead_kit, site_folder.path / "state"):
        close_to_others(folder)


def check(site_folder: SiteFolder) -> None:
    """Refuse a kit with a file more than `harden` leaves, which can change what a site accepts, or without its keys."""
    startup, local = site_folder.kit / "startup", site_folder.kit / "local"
    keys = {site_folder.certificate.name, site_folder.private_key.name, site_folder.authority.name}
    permitted = {
        startup: {_startup_name(site_folder), *keys},
        local: {"resources.json", "authorization.json", "log_config.json"},
    }
    for folder, names in permitted.items():
        found = {each.name for each in folder.iterdir()} if folder.is_dir() else set()
        if more := found - names:
            raise FederationError(f"{folder} has files that no kit has: {', '.join(sorted(more))}; take them away")
    if missing := [name for name in sorted(keys) if not (startup / name).is_file()]:
        raise FederationError(f"{startup} lacks {', '.join(missing)}; make it with `pbmvfl federation package`")


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
    ready = {"id": "readiness", "path": READINESS, "args": {}}
    if not site_folder.is_server:
        return {
            **common,
            "allow_log_streaming": False,
            # Without it NVFlare sends most of this very file to the server.
            "client": {"retry_timeout": 30, "site_config": {}},
            "components": [
                {
                    "id": "resource_manager",
                    "path": "nvflare.app_common.resource_managers.gpu_resource_manager.GPUResourceManager",
                    "args": {"num_of_gpus": 0, "mem_per_gpu_in_GiB": 0, "expiration_period": 30},
                },
                {
                    "id": "resource_consumer",
                    "path": "nvflare.app_common.resource_consumers.gpu_resource_consumer.GPUResourceConsumer",
                    "args": {},
                },
                {
                    "id": "process_launcher",
                    "path": f"{LAUNCHERS}.PartyLauncher",
                    "args": {},
                },
                ready,
            ],
        }
    storage = "nvflare.app_common.storages.filesystem_storage.FilesystemStorage"
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
            "path": "nvflare.app_common.state_persistors.storage_state_persistor.StorageStatePersistor",
            "args": {
                "uri_root": "/",
                "storage": {
                    "path": storage,
                    "args": {"root_dir": str(site_folder.path / "state/snapshots"), "uri_root": "/"},
                },
            },
        },
        "components": [
            {
                "id": "job_scheduler",
                "path": "nvflare.app_common.job_schedulers.job_scheduler.DefaultJobScheduler",
                "args": {
                    # One run at a time: two would use the same rows of the same parties.
                    "max_jobs": 1,
                    "min_schedule_interval": 1.0,
                    "max_schedule_interval": 5.0,
                    # A job waits for a missing site as long as the link would.
                    "max_schedule_count": max(10, int(site_folder.federation.patience // 3)),
                },
            },
            {
                "id": "job_manager",
                "path": "nvflare.apis.impl.job_def_manager.SimpleJobDefManager",
                "args": {"uri_root": str(site_folder.path / "state/jobs"), "job_store_id": "job_store"},
            },
            {"id": "job_store", "path": storage, "args": {}},
            {
                "id": "process_launcher",
                "path": f"{LAUNCHERS}.ServerLauncher",
                "args": {},
            },
            ready,
        ],
    }


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
    for here, folders, files in os.walk(folder):
        os.chmod(here, PRIVATE_FOLDER)
        for name in (*folders, *files):
            path = Path(here) / name
            if not path.is_symlink() and path.is_file():
                path.chmod(PRIVATE_FILE)


def _startup_name(site_folder: SiteFolder) -> str:
    return "fed_server.json" if site_folder.is_server else "fed_client.json"


def _harden_lead(site_folder: SiteFolder) -> None:
    """Harden the submitter's kit: it dials the server, and keeps downloads inside its own folder."""
    federation = site_folder.federation
    startup, local = site_folder.lead_kit / "startup", site_folder.lead_kit / "local"
    for folder in (startup, local, site_folder.lead_kit / "transfer"):
        make_private_folder(folder)
    _empty(startup, {"client.crt", "client.key", "rootCA.pem"})
    _empty(local, set())
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
    for path, said in (
        (startup / "fed_admin.json", {"format_version": 1, "admin": admin}),
        (local / "resources.json", {"format_version": 1, "admin": {**waits, "prompt": "> "}}),
        # In its root, where it is found before any downloaded file.
        (
            site_folder.lead_kit / "comm_config.json",
            {"allow_adhoc_conns": False, "streaming_max_blob_size": LARGEST_BLOB},
        ),
    ):
        write_atomically(path, json.dumps(said, indent=1) + "\n", mode=PRIVATE_FILE)


def _empty(folder: Path, keep: set[str]) -> None:
    for each in folder.iterdir():
        if each.name not in keep:
            _remove(each)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
