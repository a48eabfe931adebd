"""The files of adapters, as PEFT and hosted Tinker write and read them."""
