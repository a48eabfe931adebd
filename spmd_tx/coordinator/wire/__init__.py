"""The formats that clients send and read, by subject: JSON structs and protobuf, without behaviour."""
