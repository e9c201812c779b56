"""What an answer may be: schemas, calls and choices as grammars, and the tokens they allow."""
