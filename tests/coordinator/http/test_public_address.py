import pytest

from spmd_tx.coordinator.http import public_address
from spmd_tx.errors import StartError


@pytest.mark.parametrize("proxies", ["localhost", "10.0.0.1/8", "127.0.0.1;::1"])
def test_proxies_that_are_no_addresses_are_refused(proxies):
    with pytest.raises(StartError, match=rf"--trusted-proxies is '{proxies}': .* name addresses or networks"):
        public_address.networks(proxies)


def test_no_proxy_at_all_may_be_trusted():
    assert public_address.networks("") == ()
