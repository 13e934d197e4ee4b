from my_flow.flow import FLOW


def test_each_price_is_written_once_although_the_shop_fails(engine, sandbox):
    sandbox.set_faults([{"vendor": "price_list", "kind": "server_error", "times": 3}])
    run = engine.run(FLOW, skus=["SKU-00001", "SKU-00002"], price="12.50")
    assert run["status"] == "completed"
    assert run["outcomes"] == {"SKU-00001": ("successful", None), "SKU-00002": ("successful", None)}
    assert len(sandbox.ledger("price_list", kind="effect")) == 2
