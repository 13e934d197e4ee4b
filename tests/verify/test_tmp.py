from ecluse.verify import audit
def test_x(world):
    r = audit(world.dsn, world.sandbox.url)
    print(r.text()); print(r.json())
    assert not r.violations
