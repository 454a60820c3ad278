"""What an organisation could slip into its request for a certificate, and what the authority makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("nvflare")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from pbmvfl.deploy.nvflare import authority
from support.federation_texts import federation_text


@pytest.mark.parametrize("role", ["lead", "project_admin", "server"])
def test_a_party_gets_no_role_no_other_name_and_no_right_to_sign(tmp_path: Path, role: str) -> None:
    (tmp_path / "federation.toml").write_text(federation_text(("bank", "hospital"), host="127.0.0.1"))
    folder = tmp_path / "authority"
    authority.init(tmp_path / "federation.toml", folder)
    said = [
        x509.NameAttribute(NameOID.COMMON_NAME, "bank"),
        x509.NameAttribute(NameOID.ORGANIZATION_NAME, "clinic"),
        x509.NameAttribute(NameOID.UNSTRUCTURED_NAME, role),  # where NVFlare looks for an admin's role
    ]
    asked = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name(said))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("clinic"), x509.DNSName("127.0.0.1")]), critical=False)
        .sign(ec.generate_private_key(ec.SECP256R1()), hashes.SHA256())
    )
    text = asked.public_bytes(serialization.Encoding.PEM).decode()
    made = x509.load_pem_x509_certificate(authority._sign(folder, text, "client", 10, "127.0.0.1").encode())
    assert [each.value for each in made.subject.get_attributes_for_oid(NameOID.COMMON_NAME)] == ["bank"]
    assert [each.value for each in made.subject.get_attributes_for_oid(NameOID.UNSTRUCTURED_NAME)] == ["client"]
    assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not made.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["bank"]
