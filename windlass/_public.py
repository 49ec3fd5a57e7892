"""All that `windlass` has at its top, imported at once."""

import windlass.types as types  # noqa: F401 (public, though not in __all__: a module)
from windlass._client.cluster import Cluster
from windlass._client.connect import connect
from windlass._client.join import join
from windlass._errors import (
    AccessDenied,
    BufferInUse,
    Cancelled,
    CheckpointFailed,
    Closed,
    CorruptCheckpoint,
    Deleted,
    ForkedProcess,
    FunctionFailed,
    InternalError,
    InvalidArgument,
    NonFinite,
    NotFound,
    ProtocolError,
    RankTaken,
    ResourceExhausted,
    ServerLost,
    ShapeMismatch,
    SpecMismatch,
    StaleMap,
    StorageFailed,
    Timeout,
    WindlassError,
    WouldDeadlock,
)
from windlass._objects.expressions import key, row
from windlass._objects.keys import unique
from windlass._objects.table import Table
from windlass._objects.tensor import Tensor
from windlass._rules.functions import function
from windlass._rules.init import Constant, Init, Normal, Uniform, Zeros
from windlass._rules.optimizers import (
    FTRL,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Lion,
    NAdam,
    RMSProp,
    RowAdagrad,
)
from windlass._rules.rule import Assign, Average, Max, Min, Rule, Sum
from windlass._rules.schedule import Schedule
from windlass._rules.sync import ASP, BSP, SSP, MaxDelay, Sync
from windlass._rules.torch_rule import TorchRule
from windlass._rules.user_rules import rule

__all__ = [
    "ASP",
    "BSP",
    "FTRL",
    "SGD",
    "SSP",
    "AccessDenied",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Assign",
    "Average",
    "BufferInUse",
    "Cancelled",
    "CheckpointFailed",
    "Closed",
    "Cluster",
    "Constant",
    "CorruptCheckpoint",
    "Deleted",
    "ForkedProcess",
    "FunctionFailed",
    "Init",
    "InternalError",
    "InvalidArgument",
    "Lion",
    "Max",
    "MaxDelay",
    "Min",
    "NAdam",
    "NonFinite",
    "Normal",
    "NotFound",
    "ProtocolError",
    "RMSProp",
    "RankTaken",
    "ResourceExhausted",
    "RowAdagrad",
    "Rule",
    "Schedule",
    "ServerLost",
    "ShapeMismatch",
    "SpecMismatch",
    "StaleMap",
    "StorageFailed",
    "Sum",
    "Sync",
    "Table",
    "Tensor",
    "Timeout",
    "TorchRule",
    "Uniform",
    "WindlassError",
    "WouldDeadlock",
    "Zeros",
    "connect",
    "function",
    "join",
    "key",
    "row",
    "rule",
    "unique",
]
