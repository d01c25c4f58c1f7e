"""Operations that can be taken back: steps, signals, and the guard that takes over when gpucr dies."""
