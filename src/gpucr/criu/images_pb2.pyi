from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SignalOwner(_message.Message):
    __slots__ = ("uid", "euid", "signum", "pid")
    UID_FIELD_NUMBER: _ClassVar[int]
    EUID_FIELD_NUMBER: _ClassVar[int]
    SIGNUM_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    uid: int
    euid: int
    signum: int
    pid: int
    def __init__(self, uid: _Optional[int] = ..., euid: _Optional[int] = ..., signum: _Optional[int] = ..., pid: _Optional[int] = ...) -> None: ...

class RegularFile(_message.Message):
    __slots__ = ("id", "flags", "pos", "fown", "name", "size", "ext", "mode")
    ID_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    POS_FIELD_NUMBER: _ClassVar[int]
    FOWN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    EXT_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    id: int
    flags: int
    pos: int
    fown: SignalOwner
    name: bytes
    size: int
    ext: bool
    mode: int
    def __init__(self, id: _Optional[int] = ..., flags: _Optional[int] = ..., pos: _Optional[int] = ..., fown: _Optional[_Union[SignalOwner, _Mapping]] = ..., name: _Optional[bytes] = ..., size: _Optional[int] = ..., ext: bool = ..., mode: _Optional[int] = ...) -> None: ...

class InternetSocket(_message.Message):
    __slots__ = ("id", "ino", "family", "type", "proto", "state", "src_port", "dst_port", "flags", "backlog", "src_addr", "dst_addr", "fown", "shutdown")
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
    FOWN_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_FIELD_NUMBER: _ClassVar[int]
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
    fown: SignalOwner
    shutdown: int
    def __init__(self, id: _Optional[int] = ..., ino: _Optional[int] = ..., family: _Optional[int] = ..., type: _Optional[int] = ..., proto: _Optional[int] = ..., state: _Optional[int] = ..., src_port: _Optional[int] = ..., dst_port: _Optional[int] = ..., flags: _Optional[int] = ..., backlog: _Optional[int] = ..., src_addr: _Optional[_Iterable[int]] = ..., dst_addr: _Optional[_Iterable[int]] = ..., fown: _Optional[_Union[SignalOwner, _Mapping]] = ..., shutdown: _Optional[int] = ...) -> None: ...

class UnixSocket(_message.Message):
    __slots__ = ("id", "ino", "type", "state", "uflags", "peer", "fown", "name")
    ID_FIELD_NUMBER: _ClassVar[int]
    INO_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    UFLAGS_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    FOWN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    id: int
    ino: int
    type: int
    state: int
    uflags: int
    peer: int
    fown: SignalOwner
    name: bytes
    def __init__(self, id: _Optional[int] = ..., ino: _Optional[int] = ..., type: _Optional[int] = ..., state: _Optional[int] = ..., uflags: _Optional[int] = ..., peer: _Optional[int] = ..., fown: _Optional[_Union[SignalOwner, _Mapping]] = ..., name: _Optional[bytes] = ...) -> None: ...

class Fifo(_message.Message):
    __slots__ = ("pipe_id", "regf_id")
    PIPE_ID_FIELD_NUMBER: _ClassVar[int]
    REGF_ID_FIELD_NUMBER: _ClassVar[int]
    pipe_id: int
    regf_id: int
    def __init__(self, pipe_id: _Optional[int] = ..., regf_id: _Optional[int] = ...) -> None: ...

class TerminalFile(_message.Message):
    __slots__ = ("id", "tty_info_id", "fown", "regf_id")
    ID_FIELD_NUMBER: _ClassVar[int]
    TTY_INFO_ID_FIELD_NUMBER: _ClassVar[int]
    FOWN_FIELD_NUMBER: _ClassVar[int]
    REGF_ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    tty_info_id: int
    fown: SignalOwner
    regf_id: int
    def __init__(self, id: _Optional[int] = ..., tty_info_id: _Optional[int] = ..., fown: _Optional[_Union[SignalOwner, _Mapping]] = ..., regf_id: _Optional[int] = ...) -> None: ...

class Terminal(_message.Message):
    __slots__ = ("id", "type")
    ID_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    id: int
    type: int
    def __init__(self, id: _Optional[int] = ..., type: _Optional[int] = ...) -> None: ...

class Pipe(_message.Message):
    __slots__ = ("pipe_id", "fown")
    PIPE_ID_FIELD_NUMBER: _ClassVar[int]
    FOWN_FIELD_NUMBER: _ClassVar[int]
    pipe_id: int
    fown: SignalOwner
    def __init__(self, pipe_id: _Optional[int] = ..., fown: _Optional[_Union[SignalOwner, _Mapping]] = ...) -> None: ...

class MemoryFile(_message.Message):
    __slots__ = ("fown", "inode_id")
    FOWN_FIELD_NUMBER: _ClassVar[int]
    INODE_ID_FIELD_NUMBER: _ClassVar[int]
    fown: SignalOwner
    inode_id: int
    def __init__(self, fown: _Optional[_Union[SignalOwner, _Mapping]] = ..., inode_id: _Optional[int] = ...) -> None: ...

class EventFile(_message.Message):
    __slots__ = ("fown",)
    FOWN_FIELD_NUMBER: _ClassVar[int]
    fown: SignalOwner
    def __init__(self, fown: _Optional[_Union[SignalOwner, _Mapping]] = ...) -> None: ...

class FileEntry(_message.Message):
    __slots__ = ("type", "id", "reg", "isk", "efd", "epfd", "sgfd", "tfd", "usk", "fifo", "pipe", "tty", "memfd")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    REG_FIELD_NUMBER: _ClassVar[int]
    ISK_FIELD_NUMBER: _ClassVar[int]
    EFD_FIELD_NUMBER: _ClassVar[int]
    EPFD_FIELD_NUMBER: _ClassVar[int]
    SGFD_FIELD_NUMBER: _ClassVar[int]
    TFD_FIELD_NUMBER: _ClassVar[int]
    USK_FIELD_NUMBER: _ClassVar[int]
    FIFO_FIELD_NUMBER: _ClassVar[int]
    PIPE_FIELD_NUMBER: _ClassVar[int]
    TTY_FIELD_NUMBER: _ClassVar[int]
    MEMFD_FIELD_NUMBER: _ClassVar[int]
    type: int
    id: int
    reg: RegularFile
    isk: InternetSocket
    efd: EventFile
    epfd: EventFile
    sgfd: EventFile
    tfd: EventFile
    usk: UnixSocket
    fifo: Fifo
    pipe: Pipe
    tty: TerminalFile
    memfd: MemoryFile
    def __init__(self, type: _Optional[int] = ..., id: _Optional[int] = ..., reg: _Optional[_Union[RegularFile, _Mapping]] = ..., isk: _Optional[_Union[InternetSocket, _Mapping]] = ..., efd: _Optional[_Union[EventFile, _Mapping]] = ..., epfd: _Optional[_Union[EventFile, _Mapping]] = ..., sgfd: _Optional[_Union[EventFile, _Mapping]] = ..., tfd: _Optional[_Union[EventFile, _Mapping]] = ..., usk: _Optional[_Union[UnixSocket, _Mapping]] = ..., fifo: _Optional[_Union[Fifo, _Mapping]] = ..., pipe: _Optional[_Union[Pipe, _Mapping]] = ..., tty: _Optional[_Union[TerminalFile, _Mapping]] = ..., memfd: _Optional[_Union[MemoryFile, _Mapping]] = ...) -> None: ...

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

class Remap(_message.Message):
    __slots__ = ("orig_id", "remap_id", "remap_type")
    ORIG_ID_FIELD_NUMBER: _ClassVar[int]
    REMAP_ID_FIELD_NUMBER: _ClassVar[int]
    REMAP_TYPE_FIELD_NUMBER: _ClassVar[int]
    orig_id: int
    remap_id: int
    remap_type: int
    def __init__(self, orig_id: _Optional[int] = ..., remap_id: _Optional[int] = ..., remap_type: _Optional[int] = ...) -> None: ...

class GhostFile(_message.Message):
    __slots__ = ("uid", "gid", "mode", "atim", "mtim", "chunks", "size")
    UID_FIELD_NUMBER: _ClassVar[int]
    GID_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    ATIM_FIELD_NUMBER: _ClassVar[int]
    MTIM_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    uid: int
    gid: int
    mode: int
    atim: Time
    mtim: Time
    chunks: bool
    size: int
    def __init__(self, uid: _Optional[int] = ..., gid: _Optional[int] = ..., mode: _Optional[int] = ..., atim: _Optional[_Union[Time, _Mapping]] = ..., mtim: _Optional[_Union[Time, _Mapping]] = ..., chunks: bool = ..., size: _Optional[int] = ...) -> None: ...

class Time(_message.Message):
    __slots__ = ("tv_sec", "tv_usec")
    TV_SEC_FIELD_NUMBER: _ClassVar[int]
    TV_USEC_FIELD_NUMBER: _ClassVar[int]
    tv_sec: int
    tv_usec: int
    def __init__(self, tv_sec: _Optional[int] = ..., tv_usec: _Optional[int] = ...) -> None: ...

class GhostChunk(_message.Message):
    __slots__ = ("len", "off")
    LEN_FIELD_NUMBER: _ClassVar[int]
    OFF_FIELD_NUMBER: _ClassVar[int]
    len: int
    off: int
    def __init__(self, len: _Optional[int] = ..., off: _Optional[int] = ...) -> None: ...

class TreeEntry(_message.Message):
    __slots__ = ("pid", "ppid", "pgid", "sid", "threads")
    PID_FIELD_NUMBER: _ClassVar[int]
    PPID_FIELD_NUMBER: _ClassVar[int]
    PGID_FIELD_NUMBER: _ClassVar[int]
    SID_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    pid: int
    ppid: int
    pgid: int
    sid: int
    threads: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pid: _Optional[int] = ..., ppid: _Optional[int] = ..., pgid: _Optional[int] = ..., sid: _Optional[int] = ..., threads: _Optional[_Iterable[int]] = ...) -> None: ...

class Core(_message.Message):
    __slots__ = ("tc", "thread_core")
    TC_FIELD_NUMBER: _ClassVar[int]
    THREAD_CORE_FIELD_NUMBER: _ClassVar[int]
    tc: Task
    thread_core: Thread
    def __init__(self, tc: _Optional[_Union[Task, _Mapping]] = ..., thread_core: _Optional[_Union[Thread, _Mapping]] = ...) -> None: ...

class Thread(_message.Message):
    __slots__ = ("creds", "seccomp_mode")
    CREDS_FIELD_NUMBER: _ClassVar[int]
    SECCOMP_MODE_FIELD_NUMBER: _ClassVar[int]
    creds: Credentials
    seccomp_mode: int
    def __init__(self, creds: _Optional[_Union[Credentials, _Mapping]] = ..., seccomp_mode: _Optional[int] = ...) -> None: ...

class Credentials(_message.Message):
    __slots__ = ("uid", "gid", "euid", "egid", "suid", "sgid", "fsuid", "fsgid", "cap_inh", "cap_prm", "cap_eff", "cap_bnd", "secbits", "groups", "lsm_profile", "lsm_sockcreate", "apparmor_data", "no_new_privs", "cap_amb")
    UID_FIELD_NUMBER: _ClassVar[int]
    GID_FIELD_NUMBER: _ClassVar[int]
    EUID_FIELD_NUMBER: _ClassVar[int]
    EGID_FIELD_NUMBER: _ClassVar[int]
    SUID_FIELD_NUMBER: _ClassVar[int]
    SGID_FIELD_NUMBER: _ClassVar[int]
    FSUID_FIELD_NUMBER: _ClassVar[int]
    FSGID_FIELD_NUMBER: _ClassVar[int]
    CAP_INH_FIELD_NUMBER: _ClassVar[int]
    CAP_PRM_FIELD_NUMBER: _ClassVar[int]
    CAP_EFF_FIELD_NUMBER: _ClassVar[int]
    CAP_BND_FIELD_NUMBER: _ClassVar[int]
    SECBITS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    LSM_PROFILE_FIELD_NUMBER: _ClassVar[int]
    LSM_SOCKCREATE_FIELD_NUMBER: _ClassVar[int]
    APPARMOR_DATA_FIELD_NUMBER: _ClassVar[int]
    NO_NEW_PRIVS_FIELD_NUMBER: _ClassVar[int]
    CAP_AMB_FIELD_NUMBER: _ClassVar[int]
    uid: int
    gid: int
    euid: int
    egid: int
    suid: int
    sgid: int
    fsuid: int
    fsgid: int
    cap_inh: _containers.RepeatedScalarFieldContainer[int]
    cap_prm: _containers.RepeatedScalarFieldContainer[int]
    cap_eff: _containers.RepeatedScalarFieldContainer[int]
    cap_bnd: _containers.RepeatedScalarFieldContainer[int]
    secbits: int
    groups: _containers.RepeatedScalarFieldContainer[int]
    lsm_profile: bytes
    lsm_sockcreate: bytes
    apparmor_data: bytes
    no_new_privs: int
    cap_amb: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, uid: _Optional[int] = ..., gid: _Optional[int] = ..., euid: _Optional[int] = ..., egid: _Optional[int] = ..., suid: _Optional[int] = ..., sgid: _Optional[int] = ..., fsuid: _Optional[int] = ..., fsgid: _Optional[int] = ..., cap_inh: _Optional[_Iterable[int]] = ..., cap_prm: _Optional[_Iterable[int]] = ..., cap_eff: _Optional[_Iterable[int]] = ..., cap_bnd: _Optional[_Iterable[int]] = ..., secbits: _Optional[int] = ..., groups: _Optional[_Iterable[int]] = ..., lsm_profile: _Optional[bytes] = ..., lsm_sockcreate: _Optional[bytes] = ..., apparmor_data: _Optional[bytes] = ..., no_new_privs: _Optional[int] = ..., cap_amb: _Optional[_Iterable[int]] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("task_state", "comm")
    TASK_STATE_FIELD_NUMBER: _ClassVar[int]
    COMM_FIELD_NUMBER: _ClassVar[int]
    task_state: int
    comm: bytes
    def __init__(self, task_state: _Optional[int] = ..., comm: _Optional[bytes] = ...) -> None: ...

class Folders(_message.Message):
    __slots__ = ("cwd_id", "root_id")
    CWD_ID_FIELD_NUMBER: _ClassVar[int]
    ROOT_ID_FIELD_NUMBER: _ClassVar[int]
    cwd_id: int
    root_id: int
    def __init__(self, cwd_id: _Optional[int] = ..., root_id: _Optional[int] = ...) -> None: ...

class KernelObjects(_message.Message):
    __slots__ = ("files_id",)
    FILES_ID_FIELD_NUMBER: _ClassVar[int]
    files_id: int
    def __init__(self, files_id: _Optional[int] = ...) -> None: ...

class Descriptor(_message.Message):
    __slots__ = ("id", "type", "fd")
    ID_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    id: int
    type: int
    fd: int
    def __init__(self, id: _Optional[int] = ..., type: _Optional[int] = ..., fd: _Optional[int] = ...) -> None: ...

class AddressSpace(_message.Message):
    __slots__ = ("vmas",)
    VMAS_FIELD_NUMBER: _ClassVar[int]
    vmas: _containers.RepeatedCompositeFieldContainer[Mapping]
    def __init__(self, vmas: _Optional[_Iterable[_Union[Mapping, _Mapping]]] = ...) -> None: ...

class Mapping(_message.Message):
    __slots__ = ("start", "end", "pgoff", "shmid", "prot", "flags", "status", "fdflags")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    PGOFF_FIELD_NUMBER: _ClassVar[int]
    SHMID_FIELD_NUMBER: _ClassVar[int]
    PROT_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    FDFLAGS_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    pgoff: int
    shmid: int
    prot: int
    flags: int
    status: int
    fdflags: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ..., pgoff: _Optional[int] = ..., shmid: _Optional[int] = ..., prot: _Optional[int] = ..., flags: _Optional[int] = ..., status: _Optional[int] = ..., fdflags: _Optional[int] = ...) -> None: ...

class MemoryFileInode(_message.Message):
    __slots__ = ("name", "uid", "gid", "size", "shmid", "inode_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    GID_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SHMID_FIELD_NUMBER: _ClassVar[int]
    INODE_ID_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    uid: int
    gid: int
    size: int
    shmid: int
    inode_id: int
    def __init__(self, name: _Optional[bytes] = ..., uid: _Optional[int] = ..., gid: _Optional[int] = ..., size: _Optional[int] = ..., shmid: _Optional[int] = ..., inode_id: _Optional[int] = ...) -> None: ...

class TcpStream(_message.Message):
    __slots__ = ("inq_seq", "unsq_len", "snd_wl1", "rcv_wnd")
    INQ_SEQ_FIELD_NUMBER: _ClassVar[int]
    UNSQ_LEN_FIELD_NUMBER: _ClassVar[int]
    SND_WL1_FIELD_NUMBER: _ClassVar[int]
    RCV_WND_FIELD_NUMBER: _ClassVar[int]
    inq_seq: int
    unsq_len: int
    snd_wl1: int
    rcv_wnd: int
    def __init__(self, inq_seq: _Optional[int] = ..., unsq_len: _Optional[int] = ..., snd_wl1: _Optional[int] = ..., rcv_wnd: _Optional[int] = ...) -> None: ...
