"""The papers' figures, measured in this engine: `octavo bench paper --figure N`.

One file a figure, all of them in `registry`; `managers` are what is compared, `saturation` runs
them on the simulator, `output` writes plots and tables.
"""
