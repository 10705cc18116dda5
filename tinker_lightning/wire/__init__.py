"""The codec of client and server: JSON (`wire.json`), protobuf (`wire.protobuf`) and zstd (`wire.compression`)."""
