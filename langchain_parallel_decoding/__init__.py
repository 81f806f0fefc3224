"""The command ``sot``: the one place that imports all three packages and wires them together."""
