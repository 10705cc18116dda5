"""Files of a model: checkpoints on the server, downloads, exports, uploads and the tokenizer."""
