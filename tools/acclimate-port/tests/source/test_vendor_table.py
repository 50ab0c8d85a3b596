"""The table of device types agrees with acclimate's records, which this package cannot import."""

import pytest

from acclimate_port.source.vendors import VENDORS, kinds_in


def test_the_table_has_each_accelerator_that_acclimate_has_a_record_for() -> None:
    backends = pytest.importorskip("acclimate.backends")
    recorded = {record.device_type or record.name for record in backends.BUILTIN} - {"cuda", "cpu"}
    assert {vendor.device_type for vendor in VENDORS if vendor.is_backend} == recorded


@pytest.mark.parametrize("vendor", VENDORS, ids=lambda vendor: vendor.device_type)
def test_each_word_for_a_device_type_is_found_in_names(vendor) -> None:  # type: ignore[no-untyped-def]
    for word in (vendor.device_type, *vendor.words):
        assert kinds_in(f"is_{word}_available") == [vendor.device_type]
        assert kinds_in(f"Has{word.upper()}") == [vendor.device_type]
