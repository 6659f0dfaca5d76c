"""Lists the tensors of model families such as Llama: names in each tool, shapes and layouts."""
