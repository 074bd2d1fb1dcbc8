"""layoutc.specs: the built-in specs, installed beside what is built from them. There is no code here."""
