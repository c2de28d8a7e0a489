"""The benchmark runs; how long that took is for a quiet machine."""

from weightnorm.lab.benchmarks import monitor_step


def test_a_share_for_each_network(capsys):
    shares = monitor_step.main(["--rounds", "1", "--threads", "1"])
    assert list(shares) == list(monitor_step.NETWORKS)
    assert all(share > 0 for share in shares.values())
    assert "share of training" in capsys.readouterr().out
