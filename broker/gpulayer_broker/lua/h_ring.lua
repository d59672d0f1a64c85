-- Shared: waking workers. A worker with room is in idle:<class> (score: how many jobs it runs), with its room in `room`.
-- Ringing takes it out of the index, sets a deadline in `rung` and puts one entry into its inbox; it comes back by claiming.
-- What always holds: while a job waits that an idle worker could take, a bell is on its way to a worker that could take that
-- job, or whose answer hands the bell on. So whoever makes a job runnable rings one worker. Whoever frees room rings its worker,
-- if that does not claim in the same call or send, and notes the room of others on the node as unknown, which counts as room for anything.
-- Whoever answers a bell with another job, or none, or late, or leaves, hands it on; whoever was silent too long to be rung is
-- rung when it is heard again. What an earmark keeps for another job is no room (h_earmarks.lua); when it goes, that counts as
-- room that came free. Looked at are 64 owners a priority and 256 idle workers a class: what lies beyond them waits for the claim
-- that every worker makes unasked after a heartbeat and a half.

H.RING_MS = 500
H.SOME_ARE_KEPT = ''                             -- a field of `rungsig` while a machine is kept for a job: a claim reads it anyhow
H.NEIGHBOURS = '*'                               -- instead of a signature: look at what came free here, then let the next look
local AT_ONCE = 8

function H.idle_remove(P, class, w)
  if redis.call('ZREM', P .. 'idle:' .. class, w) == 0 then return end
  redis.call('HDEL', P .. 'room', w)
  if redis.call('EXISTS', P .. 'idle:' .. class) == 0 then redis.call('SREM', P .. 'idleclasses', class) end
end

local function as_text(room)
  local text = {room.cpus, room.memory, room.disk}
  for _, lot in ipairs(room.lots) do text[#text + 1] = lot.uuid .. '|' .. lot.group .. '|' .. lot.free end
  return table.concat(text, ' ')
end

function H.idle_add(P, class, w, room)
  redis.call('HSET', P .. 'room', w, H.room_text(room, as_text))
  redis.call('ZADD', P .. 'idle:' .. class, redis.call('SCARD', P .. 'running:' .. w), w)
  redis.call('SADD', P .. 'idleclasses', class)
end

local function from_text(text)
  local cpus, memory, disk, rest = string.match(text, '^(%-?%d+) (%-?%d+) (%-?%d+)(.*)$')
  local room = {cpus = tonumber(cpus), memory = tonumber(memory), disk = tonumber(disk), lots = {}}
  for uuid, group, free in string.gmatch(rest, ' ([^| ]+)|(%d+)|(%-?%d+)') do
    room.lots[#room.lots + 1] = {uuid = uuid, group = group, free = tonumber(free)}
  end
  return room
end

-- what others may have of it, and where something is kept: `all` of it, for what the earmark lets pass (h_earmarks.lua)
function H.read_room(text)
  if not text then return nil end
  if text == '?' then return {unknown = true} end
  local free, all, prio, until_ms = string.match(text, '^(.-);(.-);(%d) (%d+)$')
  local room = from_text(free or text)
  if all then room.all, room.prio, room.until_ms = all, tonumber(prio), tonumber(until_ms) end
  return room
end

-- the room of the n-th of these workers; read a few at once, and more each time
local function room_at(P, some, rooms, n)
  if rooms[n] == nil then
    for i, text in ipairs(redis.call('HMGET', P .. 'room', unpack(some, n, math.min(#some, 2 * n - 1)))) do rooms[n + i - 1] = text end
  end
  return H.read_room(rooms[n])
end

function H.mail(P, w, kind, ...)
  redis.call('XADD', P .. 'inbox:' .. w, 'MAXLEN', '~', 64, '*', 'kind', kind, ...)
end

-- a worker that must claim: out of the idle index, with a deadline after which another is rung
function H.wake(P, class, w, sig, now)
  H.idle_remove(P, class, w)
  redis.call('ZADD', P .. 'rung', now + H.RING_MS, w)
  redis.call('HSET', P .. 'rungsig', w, sig)
  H.mail(P, w, 'work')
end

-- the bell of a worker is answered or taken back: the signature that it was for, nil where none is on its way; and whether a
-- machine is kept for a job
function H.unring(P, w)
  local sig, kept = unpack(redis.call('HMGET', P .. 'rungsig', w, H.SOME_ARE_KEPT))
  if not sig then return nil, kept end
  redis.call('ZREM', P .. 'rung', w)
  redis.call('HDEL', P .. 'rungsig', w)
  return sig, kept
end

-- since when a worker that beats so often must have been heard
function H.fresh_since(heartbeat_ms, now) return now - 2.5 * tonumber(heartbeat_ms or '0') end

function H.fresh(P, w, now)
  local seen = tonumber(redis.call('ZSCORE', P .. 'workers', w) or '0')
  return seen >= H.fresh_since(redis.call('HGET', P .. 'worker:' .. w, 'heartbeat_ms') or nil, now)
end

-- spread looks at the least busy first, pack at the busiest; at most 256 of a class are looked at. `heads()`: what waits
function H.ring_class(P, class, sig, need, now, except, heads)
  local groups = redis.call('HGET', P .. 'fits:' .. class, sig)
  if not groups then return nil end
  local order = redis.call('HGET', P .. 'config', 'placement') == 'pack' and 'ZREVRANGE' or 'ZRANGE'
  local some, rooms = redis.call(order, P .. 'idle:' .. class, 0, 255), {}
  local function has_room(room)
    return room.unknown or H.fit(room, need, groups)
      or (room.all and H.passes(room, heads(), now) and H.fit(from_text(room.all), need, groups))
  end
  for n, w in ipairs(some) do
    if w ~= except then
      local room = room_at(P, some, rooms, n)
      if room and has_room(room) then
        if H.fresh(P, w, now) then
          H.wake(P, class, w, sig, now)
          return w
        end
        H.idle_remove(P, class, w)
      end
    end
  end
end

-- wakes exactly one idle worker that fits and has room, for a job of that line, where it is named: its `owner` and `prio`; the
-- clock is looked at where `now` is not told and somebody is idle
function H.ring(P, sig, now, except, line)
  local some, tried = redis.call('SRANDMEMBER', P .. 'idleclasses', 8), {}
  if #some == 0 then return nil end
  local need, waiting = H.amounts(sig), nil
  if not need then return nil end
  now = now or H.now()
  local function heads()
    waiting = waiting or H.heads_of(P, sig, line)
    return waiting
  end
  for _, class in ipairs(some) do
    tried[class] = true
    local w = H.ring_class(P, class, sig, need, now, except, heads)
    if w then return w end
  end
  if #some < 8 then return nil end
  for _, class in ipairs(redis.call('SINTER', P .. 'idleclasses', P .. 'classes:' .. sig)) do
    if not tried[class] then
      local w = H.ring_class(P, class, sig, need, now, except, heads)
      if w then return w end
    end
  end
end

-- a worker's own attempt ended in a call in which it does not claim: it is rung even if it was before, because it may have
-- answered that bell while it was full
function H.poke(P, w, now)
  local class, state = unpack(redis.call('HMGET', P .. 'worker:' .. w, 'class', 'state'))
  if not class or state ~= 'online' then return end
  local rung = redis.call('HGET', P .. 'rungsig', w)
  H.wake(P, class, w, rung or '', now)
end

local function rooms_of(P, node)
  local all = redis.call('SMEMBERS', P .. 'siblings:' .. node)
  return all, #all > 0 and redis.call('HMGET', P .. 'room', unpack(all)) or {}
end

-- a node's idle workers whose room is unknown look at what came free, a few at once; the last of them hands on to the rest
local function ring_unknown(P, node, now)
  local waiting, found = {}, {}
  for i, prio in ipairs(H.PRIORITIES) do waiting[i] = P .. 'waiting:' .. prio end
  if redis.call('EXISTS', unpack(waiting)) == 0 then return end
  local all, rooms = rooms_of(P, node)
  for i, w in ipairs(all) do
    if rooms[i] == '?' and #found <= AT_ONCE and H.fresh(P, w, now) then found[#found + 1] = w end
  end
  for i = 1, math.min(#found, AT_ONCE) do
    local sig = i == AT_ONCE and #found > AT_ONCE and H.NEIGHBOURS or ''
    H.wake(P, redis.call('HGET', P .. 'worker:' .. found[i], 'class'), found[i], sig, now)
  end
end

-- the rooms of a node's idle workers are no longer what was written down
function H.doubt_rooms(P, node, except)
  local all, rooms = rooms_of(P, node)
  for i, w in ipairs(all) do
    if w ~= except and rooms[i] then redis.call('HSET', P .. 'room', w, '?') end
  end
end

-- a node's workers see what came free: at once where something waits, else with the next job that may fit them
function H.poke_node(P, node, except, now)
  H.doubt_rooms(P, node, except)
  ring_unknown(P, node, now)
end

function H.poke_siblings(P, node, except, now)
  if redis.call('SCARD', P .. 'siblings:' .. node) > 1 then H.poke_node(P, node, except, now) end
end

-- the bell that a worker did not follow goes to another
function H.hand_on(P, w, sig, now)
  if sig == H.NEIGHBOURS then ring_unknown(P, redis.call('HGET', P .. 'worker:' .. w, 'node') or '', now)
  elseif sig and sig ~= '' and H.is_waiting(P, sig) then H.ring(P, sig, now, w) end
end
