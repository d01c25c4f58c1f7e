from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegularFile(_message.Message):
    __slots__ = ("id", "flags", "pos", "name", "size")
    ID_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    POS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    id: int
    flags: int
    pos: int
    name: bytes
    size: int
    def __init__(self, id: _Optional[int] = ..., flags: _Optional[int] = ..., pos: _Optional[int] = ..., name: _Optional[bytes] = ..., size: _Optional[int] = ...) -> None: ...

class InternetSocket(_message.Message):
    __slots__ = ("id", "ino", "family", "type", "proto", "state", "src_port", "dst_port", "flags", "backlog", "src_addr", "dst_addr")
    ID_FIELD_NUMBER: _ClassVar[int]
    INO_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    PROTO_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SRC_PORT_FIELD_NUMBER: _ClassVar[int]
    DST_PORT_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_FIELD_NUMBER: _ClassVar[int]
    SRC_ADDR_FIELD_NUMBER: _ClassVar[int]
    DST_ADDR_FIELD_NUMBER: _ClassVar[int]
    id: int
    ino: int
    family: int
    type: int
    proto: int
    state: int
    src_port: int
    dst_port: int
    flags: int
    backlog: int
    src_addr: _containers.RepeatedScalarFieldContainer[int]
    dst_addr: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[int] = ..., ino: _Optional[int] = ..., family: _Optional[int] = ..., type: _Optional[int] = ..., proto: _Optional[int] = ..., state: _Optional[int] = ..., src_port: _Optional[int] = ..., dst_port: _Optional[int] = ..., flags: _Optional[int] = ..., backlog: _Optional[int] = ..., src_addr: _Optional[_Iterable[int]] = ..., dst_addr: _Optional[_Iterable[int]] = ...) -> None: ...

class FileEntry(_message.Message):
    __slots__ = ("type", "id", "reg", "isk")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    REG_FIELD_NUMBER: _ClassVar[int]
    ISK_FIELD_NUMBER: _ClassVar[int]
    type: int
    id: int
    reg: RegularFile
    isk: InternetSocket
    def __init__(self, type: _Optional[int] = ..., id: _Optional[int] = ..., reg: _Optional[_Union[RegularFile, _Mapping]] = ..., isk: _Optional[_Union[InternetSocket, _Mapping]] = ...) -> None: ...

class PagemapHead(_message.Message):
    __slots__ = ("pages_id",)
    PAGES_ID_FIELD_NUMBER: _ClassVar[int]
    pages_id: int
    def __init__(self, pages_id: _Optional[int] = ...) -> None: ...

class PagemapEntry(_message.Message):
    __slots__ = ("vaddr", "compat_nr_pages", "in_parent", "flags", "nr_pages")
    VADDR_FIELD_NUMBER: _ClassVar[int]
    COMPAT_NR_PAGES_FIELD_NUMBER: _ClassVar[int]
    IN_PARENT_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    NR_PAGES_FIELD_NUMBER: _ClassVar[int]
    vaddr: int
    compat_nr_pages: int
    in_parent: bool
    flags: int
    nr_pages: int
    def __init__(self, vaddr: _Optional[int] = ..., compat_nr_pages: _Optional[int] = ..., in_parent: bool = ..., flags: _Optional[int] = ..., nr_pages: _Optional[int] = ...) -> None: ...
