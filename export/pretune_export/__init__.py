"""The training side of pretune: collect, train, evaluate, export, write cards."""
