-- Shared: streams of runnable jobs and the index of their oldest entries. An entry's id is `<seq>-0`, so ages compare across
-- streams. A stream holds runnable jobs only, exists only while it has an entry, and has one group with two consumers:
-- `held` (granted) and `returned` (handed back at its old age).
-- waiting:<prio> (owners) -> heads:<prio>:<owner> (signature -> oldest seq) -> queue:<sig>:<owner>:<prio>

function H.stream(P, sig, owner, prio) return P .. 'queue:' .. sig .. ':' .. owner .. ':' .. prio end

local function seq_of(entry) return tonumber(string.match(entry, '^%d+')) end

-- the oldest entry that nobody has read yet, or nil
function H.unread(key)
  local g = redis.pcall('XINFO', 'GROUPS', key)
  if g.err or not g[1] then return nil end
  local last
  for i = 1, #g[1], 2 do if g[1][i] == 'last-delivered-id' then last = g[1][i + 1] end end
  local e = redis.call('XRANGE', key, '(' .. last, '+', 'COUNT', 1)
  return e[1] and seq_of(e[1][1])
end

function H.returned(key)
  local p = redis.pcall('XPENDING', key, 'g', '-', '+', 1, 'returned')
  if p.err then return nil end
  return p[1] and seq_of(p[1][1])
end

function H.set_head(P, sig, owner, prio, a, b)
  local heads = P .. 'heads:' .. prio .. ':' .. owner
  local oldest = a and b and math.min(a, b) or a or b
  if oldest then
    if redis.call('ZADD', heads, oldest, sig) == 1 then redis.call('SADD', P .. 'waiting:' .. prio, owner) end
  elseif redis.call('ZREM', heads, sig) == 1 and redis.call('EXISTS', heads) == 0 then
    redis.call('SREM', P .. 'waiting:' .. prio, owner)
  end
end

-- the age of whatever happens next
function H.next_age(P)
  local seq = redis.pcall('INCR', P .. 'seq')
  if type(seq) ~= 'number' then H.fail('the counter ' .. P .. 'seq', seq.err) end
  return seq
end

-- appends a runnable job at an age that no entry of its stream has reached; returns its entry
function H.append(P, id, sig, owner, prio, seq)
  local key, entry = H.stream(P, sig, owner, prio), string.format('%d-0', seq)
  if redis.call('XADD', key, 'NOMKSTREAM', entry, 'j', id) == false then
    redis.call('XGROUP', 'CREATE', key, 'g', '0', 'MKSTREAM')
    redis.call('XADD', key, entry, 'j', id)
  end
  if redis.call('ZADD', P .. 'heads:' .. prio .. ':' .. owner, 'NX', seq, sig) == 1 then
    redis.call('SADD', P .. 'waiting:' .. prio, owner)
  end
  return entry
end

-- takes the head entry of a stream for the consumer `held`; returns job id, entry id, and whether nobody has had it before
function H.take(P, sig, owner, prio, seq)
  local key, entry, id = H.stream(P, sig, owner, prio), seq .. '-0', nil
  local back = H.returned(key)
  if back == seq then
    redis.call('XCLAIM', key, 'g', 'held', 0, entry, 'JUSTID')
    local e = redis.call('XRANGE', key, entry, entry)
    id = e[1] and e[1][2][2]
    H.set_head(P, sig, owner, prio, H.returned(key), H.unread(key))
    return id, entry
  end
  local r = redis.pcall('XREADGROUP', 'GROUP', 'g', 'held', 'COUNT', 1, 'STREAMS', key, '>')
  if type(r) == 'table' and not r.err and r[1] then
    entry, id = r[1][2][1][1], r[1][2][1][2][2]
    local nx = redis.call('XRANGE', key, '(' .. entry, '+', 'COUNT', 1)
    H.set_head(P, sig, owner, prio, back, nx[1] and seq_of(nx[1][1]))
  else
    H.set_head(P, sig, owner, prio, back, nil)
  end
  return id, entry, id ~= nil and not back
end

-- hands an entry back at its age
function H.put_back(P, sig, owner, prio, entry)
  redis.call('XCLAIM', H.stream(P, sig, owner, prio), 'g', 'returned', 0, entry, 'JUSTID')
  redis.call('ZADD', P .. 'heads:' .. prio .. ':' .. owner, 'LT', seq_of(entry), sig)
  redis.call('SADD', P .. 'waiting:' .. prio, owner)
end

-- removes an entry that an attempt held, which is no stream's head
function H.drop_held(P, sig, owner, prio, entry) H.remove_entry(H.stream(P, sig, owner, prio), entry) end

-- removes an entry that may be its stream's head
function H.drop_entry(P, sig, owner, prio, entry)
  local key = H.stream(P, sig, owner, prio)
  local left = H.remove_now(key, entry)
  local head = redis.call('ZSCORE', P .. 'heads:' .. prio .. ':' .. owner, sig)
  if head and not left then H.set_head(P, sig, owner, prio, nil, nil)
  elseif head and tonumber(head) == seq_of(entry) then H.set_head(P, sig, owner, prio, H.returned(key), H.unread(key)) end
end

function H.is_waiting(P, sig)
  for _, prio in ipairs(H.PRIORITIES) do
    for _, owner in ipairs(redis.call('SRANDMEMBER', P .. 'waiting:' .. prio, 64)) do
      if redis.call('ZSCORE', P .. 'heads:' .. prio .. ':' .. owner, sig) then return true end
    end
  end
  return false
end
