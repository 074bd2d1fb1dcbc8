"""Names that pickles hold, and that therefore never move: functions that a pickled model calls when it is loaded."""

from layoutc.runtime.cast.plain_state_dicts import give_plain as give_plain
from layoutc.runtime.cast.plain_state_dicts import take_plain as take_plain
from layoutc.runtime.cast.tensor import rebuild_cast as rebuild_cast
from layoutc.runtime.dispatch.broadcasts import take_sent as take_sent
