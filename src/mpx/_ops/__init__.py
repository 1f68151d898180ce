"""Operations with a plain specification, a kernel and a derivative each."""
