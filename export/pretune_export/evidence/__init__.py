"""What speaks for weights or against them: ranking, baselines, fidelity, scaling, search, and their plots."""
