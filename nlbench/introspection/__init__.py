"""PyTorch's internals, for all probes. No other folder uses private parts of PyTorch.

Operations: `operations`, `function_calls`, `dispatch`, `attention`. Names of modules and calls:
`module_stack`. Axes: `axes`, `axis_rules`. The model: `model_state` (evaluation mode, restored
afterwards), `model_copy`. Random generators and seeds: `random_state`. Memory and batches:
`memory`, `batch_independence`. The process: `process_state`, `precision`, `threads`.
"""
