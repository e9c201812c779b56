"""A model's config.json, or a GGUF file's metadata, read into `ModelConfig`.

build.py: config.json -> ModelConfig; layer_spec.py: ModelConfig -> what each layer computes;
families/: one file a family, with its tensor names and what GGUF files have of it;
gguf_config.py: GGUF metadata -> config.json, BOS and EOS among it; activations.py: activation
functions.
"""
